"""Tests of several engines, on one machine and behind routers."""
