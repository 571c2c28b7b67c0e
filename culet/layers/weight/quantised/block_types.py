"""The types of tensors in GGUF files. No torch."""

from __future__ import annotations

FLOAT32 = "F32"
# By number: name, values per block, and bytes per block.
READ_TYPES = {0: (FLOAT32, 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 8: ("Q8_0", 32, 34)}
READ_TYPES |= {14: ("Q6_K", 256, 210)}
# By name: values per block, and bytes per block.
BLOCK_SIZES = {name: (values, size) for name, values, size in READ_TYPES.values()}
# By name: the offset of the float16 scale in a block.
SCALE_OFFSETS = {"Q4_0": 0, "Q8_0": 0, "Q6_K": 208}
OTHER_TYPES = {3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 15: "Q8_K"}
OTHER_TYPES |= {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS"}
OTHER_TYPES |= {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}
READ_NAMES = "Q4_0, Q8_0, Q6_K, F16, BF16 or F32"
# By name: the bits of a value in memory. Others are plain.
BITS = {"Q4_0": 4, "Q8_0": 8}
GROUP = 32  # values per scale of these
