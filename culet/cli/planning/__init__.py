"""What `culet plan` computes, apart from how it is shown."""
