"""`eagle inspect`: what an artifact is, where it comes from, what is in it, whether it is still whole."""
