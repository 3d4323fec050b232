"""Modelling files for families whose attention has no K/V-head count in transformers; each is
copied into the checkpoints it serves.

The files import torch and transformers only. Here they are made known to transformers' auto
classes, so that where gqa-convert is installed its checkpoints load without `trust_remote_code`:

    import gqa_convert

    gqa_convert.register_modeling()
"""

from importlib import import_module

from gqa_convert.families.table import FAMILIES


def register_modeling(model_type: str | None = None) -> None:
    """Make converted model types known to transformers' auto classes, in this process.

    Args:
        model_type: `gqa_t5` or the like, to import no more than is needed; by default all.
    """
    import transformers

    for name, family in FAMILIES.items():
        form = family.modeling
        if form is None or not family.is_converted or model_type not in (None, name):
            continue
        module = import_module(f"gqa_convert.families.modeling.{form.file}")
        config = getattr(module, form.classes["AutoConfig"])
        for auto, class_name in form.classes.items():
            registered = getattr(module, class_name)
            registered.register_for_auto_class(auto)  # so that save_pretrained takes the file along
            key = name if registered is config else config
            getattr(transformers, auto).register(key, registered, exist_ok=True)
