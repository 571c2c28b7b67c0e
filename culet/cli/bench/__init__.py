"""`culet bench` and its commands."""
