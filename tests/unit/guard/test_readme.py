"""README's table of guard settings says what the code does."""

import re
from dataclasses import fields
from pathlib import Path

from hicache_hooks.guard_settings import PREFIX, GuardSettings

README = Path(__file__).resolve().parents[3] / "README.md"


def test_the_table_names_every_setting_with_its_default() -> None:
    section = README.read_text().split("<!-- guard:begin -->")[1].split("<!-- guard:end -->")[0]
    rows = dict(re.findall(r"^\| `(guard_\w+)` \| ([\d.]+) \|", section, re.M))
    assert rows == {PREFIX + field.name: str(getattr(GuardSettings(), field.name)) for field in fields(GuardSettings)}
