"""Decode latency, throughput, prefill and K/V cache of a model at several numbers of K/V heads."""
