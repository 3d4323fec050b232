"""Uptraining: the run of a recipe, from its checks to the published model.

The way of a step: `uptrain_checkpoint` (`uptrain`) reads a recipe (`recipe`) and hands it to a run
(`run`), which opens models and texts (`opening`), loads student and teacher (`models`), and places
them on the devices (`gqa_convert.sharding`). For step n, the trainer (`trainer`) takes the samples
n * b to (n + 1) * b - 1 and this process's share of them in micro-batches, adds up the gradients of
their losses, clips them, sets the learning rate and lets the optimizer (`optimizers`) update. Its
numbers (`metrics`) go to `metrics.jsonl` and trackers in the output folder (`run_folder`). Now and
then the run evaluates, or saves weights, moments and its progress (`checkpoints`); a signal
(`stopping`) ends it between two steps. After the last one the whole weights become an ordinary
checkpoint (`export`).

`estimate` takes a step with models that have no numbers, and counts.
"""
