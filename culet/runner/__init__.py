"""From a StepPlan to a StepResult."""
