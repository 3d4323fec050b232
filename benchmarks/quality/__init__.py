"""The models on which merging methods are judged: trained here, converted by every method, and reported.

In the repository's root, with the models in ~/.cache/gqa-convert/quality unless `--cache` says otherwise; every command
goes on where it was stopped:

    python -m benchmarks.quality.train qwen2          likewise gpt2 and t5; the bundled model is there already
    python -m benchmarks.quality.measure              docs/results/quality.json
    python -m benchmarks.quality.report               docs/results/README.md
"""
