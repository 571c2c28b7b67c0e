"""Linear layers and experts whose weights are int4, int8, fp8 or nvfp4."""
