"""The pipeline's stages and what they share. Importing this package imports nothing heavy."""

__version__ = "0.1.0"
