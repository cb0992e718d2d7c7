"""Simulated clusters, fault options and oracles. Ships with the package; imports nothing by itself."""
