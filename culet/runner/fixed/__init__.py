"""Run steps, draws and draft rounds in fixed shapes, which a GPU replays as CUDA graphs."""
