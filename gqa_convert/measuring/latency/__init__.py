"""Decode latency, throughput, prefill and K/V cache of a model at several numbers of K/V heads."""

from gqa_convert.measuring.latency.run import BenchmarkOptions, benchmark_model

__all__ = ["BenchmarkOptions", "benchmark_model"]
