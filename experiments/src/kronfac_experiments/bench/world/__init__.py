"""`kronfac bench world`: what several processes would compute, send and hold, planned and not run."""

from kronfac_experiments.bench.world.command import WorldConfig, world_command

__all__ = ["WorldConfig", "world_command"]
