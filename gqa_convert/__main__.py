"""`python -m gqa_convert`, which launchers such as accelerate and torchrun need."""

from gqa_convert.cli import main

if __name__ == "__main__":
    main()
