"""Calibration on several devices: a process for each, which hold the same heads and divide the text."""

from gqa_convert.conversion.fit.processes.group import ALONE, ProcessGroup
from gqa_convert.conversion.fit.processes.launching import on_devices
from gqa_convert.conversion.fit.processes.messages import Job
from gqa_convert.conversion.fit.processes.shares import Share, own_sequences, sequences

__all__ = ["ALONE", "Job", "ProcessGroup", "Share", "on_devices", "own_sequences", "sequences"]
