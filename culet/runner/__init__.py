"""Run a StepPlan and return a StepResult."""
