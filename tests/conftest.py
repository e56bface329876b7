"""Settings of all tests. Time is measured in benchmarks only: a slow example on a busy machine is not a failure."""

from hypothesis import settings

settings.register_profile("megatron_rl", deadline=None)
# Many more broken inputs, other ones in each run: see tests/fuzz.py.
settings.register_profile("fuzz", deadline=None)
settings.load_profile("megatron_rl")
