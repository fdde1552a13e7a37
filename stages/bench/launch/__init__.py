"""Servers that bench starts, measures and stops: eagle, vLLM and llama.cpp's."""

from stages.bench.launch.launched import Launched
from stages.bench.launch.line import LaunchLine
from stages.bench.launch.start import launch_all

__all__ = ["LaunchLine", "Launched", "launch_all"]
