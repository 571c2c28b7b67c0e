"""`culet bench`: measurements that users run."""
