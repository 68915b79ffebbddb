"""Simulated time, network and peers that drive the real protocol cores."""
