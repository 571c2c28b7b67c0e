"""Operations: tensors in, tensors out. `reference.py` is the eager oracle of every one."""
