"""Decode latency, throughput, prefill and K/V cache of a model at several numbers of K/V heads."""

from gqa_convert.measuring.benchmark.options import BenchmarkOptions
from gqa_convert.measuring.benchmark.run import benchmark_model

__all__ = ["BenchmarkOptions", "benchmark_model"]
