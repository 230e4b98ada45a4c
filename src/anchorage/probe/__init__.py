"""Probes on a cache: labels from the token stream, matched designs, solvers, sweeps over the sites."""
