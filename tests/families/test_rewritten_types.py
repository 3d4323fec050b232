"""Types that are rewritten before they are converted: what the tables of families say of them."""

import pytest

from gqa_convert.conversion.rewriting.stock_form import DECODERS, REMOTE_CODE
from gqa_convert.errors import RemoteCodeError
from gqa_convert.families.table import FAMILIES, REFUSALS, REWRITTEN, find_family


@pytest.mark.parametrize("model_type", REWRITTEN)
def test_other_commands_say_what_to_do(model_type: str) -> None:
    with pytest.raises(RemoteCodeError, match=rf"gqa-convert convert SOURCE PLAIN.*{REWRITTEN[model_type]}"):
        find_family(model_type)


def test_the_tables_agree() -> None:
    assert {name: form.stock for name, form in REMOTE_CODE.items()} == REWRITTEN
    assert set(REWRITTEN.values()) <= set(FAMILIES)
    assert not set(REWRITTEN) & (set(FAMILIES) | set(REFUSALS))
    for form in DECODERS:
        family = FAMILIES[form.model_type]
        assert form.fused_layout == (family.fused_layout if family.fused else None)
        assert form.interleaved == (family.rotary == "interleaved")
        assert form.transposed == family.transposed
        assert family.modeling or family.becomes == form.stock
