"""Units of measurement after a number or a formula: what they measure, and their size."""

import re
from typing import NamedTuple

_TABLE = """
length: m meter metre=1 km kilometer kilometre=1000 dm=1/10 cm centimeter centimetre=1/100 mm millimeter millimetre=1/1000
 nm=1/10^9 in inch inche=254/10000 ft foot feet=3048/10000 yd yard=9144/10000 mi mile=1609344/1000
mass: kg kilogram=1 g gram=1/1000 mg milligram=1/10^6 t ton tonne=1000 lb lbs pound=45359237/10^8 oz ounce=45359237/16/10^8
time: s sec second=1 ms millisecond=1/1000 min minute=60 h hr hour=3600 day=86400 week=604800 month=2629746 yr year=31556952
angle: ° degree deg=1 rad radian=180/\\pi
money: dollar USD=1 cent=1/100
euro: euro EUR=1
sterling: GBP=1
volume: L l liter litre=1/1000 ml mL milliliter millilitre=1/10^6 gallon=3785411784/10^12
celsius: °C=1
fahrenheit: °F=1
kelvin: K kelvin=1
energy: J joule=1 kJ=1000 cal calorie=4184/1000 kcal=4184
power: W watt=1 kW kilowatt=1000
force: N newton=1 kN=1000
voltage: V volt=1 mV=1/1000
current: A amp ampere=1 mA=1/1000
frequency: Hz hertz=1 kHz=1000 MHz=10^6
data: bit=1 byte B=8 KB kB=8000 MB=8*10^6 GB=8*10^9
"""
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "GBP"}
_CURRENCY = re.compile(r"([-+]?)\s*\\?([$€£])\s*(?=[0-9.])([^$€£]*)")
_MARKUP = (
    (re.compile(r"\\(?:text|textbf|textnormal|textrm|mathrm|mathbf|mbox|operatorname|rm)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degrees?(?![A-Za-z])"), "°"),
    (re.compile(r"\\[,;: ]|~|(?<!\\)\$"), " "),
    (re.compile(r"\bmph\b"), "mi/h"),
    (re.compile(r"\bkm?ph\b"), "km/h"),
    (re.compile(r"\^\s*\{\s*(-?[0-9])\s*\}"), r"^\1"),
)
_WORD = r"(?:°\s*[CF]?|[A-Za-z]+)(?:\s*\^\s*-?[1-3]|[²³])?"
_FACTOR = re.compile(rf"\s*(?P<per>per\b|/)?\s*[·⋅*]?\s*(?P<power>square\b|sq\b|cubic\b)?\s*(?P<word>{_WORD})")
_UNIT = re.compile(
    r"(?:(?<=[0-9)}\]])|(?<=\\pi))(?:\s+(?=[A-Za-z])|\s*(?=°)|(?=[A-Za-z]{2}))(?:"
    + re.sub(r"\?P<[a-z]+>", "", _FACTOR.pattern)
    + ")+$"
)
_NAME = re.compile(r"^\s*[A-Za-z]+(?:_[0-9])?\s*=|\\[A-Za-z]+|(?<=[0-9])e(?=[-+0-9])")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_MAX_CHARS = 200
_SUPERSCRIPTS = str.maketrans("²³", "23")
_POWERS = {"square": 2, "sq": 2, "cubic": 3}


class Unit(NamedTuple):
    dimensions: tuple[tuple[str, int], ...]
    """(measured quantity, power), sorted."""
    size: str
    """In the base units, as LaTeX."""


def _read_table() -> dict[str, tuple[str, str]]:
    units = {}
    for line in _TABLE.replace("\n ", " ").strip().splitlines():
        quantity, _, entries = line.partition(": ")
        for names, size in re.findall(r"([^=]+)=(\S+)\s*", entries):
            units.update(dict.fromkeys(names.split(), (quantity, size)))
    return units


_UNITS = _read_table()


def split_unit(text: str) -> tuple[str, Unit | None]:
    """(text without its unit, unit); (text, None) if it does not end in a known unit after a number or a constant."""
    if len(text) > _MAX_CHARS or _TRIGONOMETRY.search(text):
        return text, None
    currency = _CURRENCY.fullmatch(text.strip(" ."))
    if currency:
        return currency[1] + currency[3], _unit(_CURRENCIES[currency[2]])
    plain = text
    for markup, replacement in _MARKUP:
        plain = markup.sub(replacement, plain)
    plain = plain.rstrip(" .*")
    match = _UNIT.search(plain)
    unit = _unit(match.group()) if match else None
    if match is None or unit is None or re.search("[A-Za-z]", _NAME.sub("", plain[: match.start()])):
        return text, None
    return plain[: match.start()].strip(" *"), unit


def leading_unit(text: str) -> str:
    """The longest known unit of at most three words that ``text`` starts with, after a space; "" if there is none."""
    words = re.split(r"[.,;!?\n]|\$(?![0-9])", text.lstrip("$ "))[0].split()
    heads = (" ".join(["", *words[:count]]) for count in (3, 2, 1))
    return next((head for head in heads if split_unit(f"1{head}")[1]), "")


def unit_behind(text: str) -> Unit | None:
    """The known unit that follows the last number of ``text``."""
    tail = re.split("[0-9]", text)[-1]
    return split_unit(f"1{leading_unit(tail)}")[1]


def _unit(text: str) -> Unit | None:
    """The unit that ``text`` spells; None if it contains a word that is not a unit."""
    dimensions: dict[str, int] = {}
    sizes = []
    for factor in _FACTOR.finditer(text):
        name, digits = re.fullmatch(r"([^\^²³]*)(.*)", factor["word"].replace(" ", "")).groups()  # type: ignore[union-attr]
        known = _UNITS.get(name) or _UNITS.get(name.lower()) or _UNITS.get(name.lower().removesuffix("s"))
        if known is None:
            return None
        power = int(digits.lstrip("^").translate(_SUPERSCRIPTS) or _POWERS.get(factor["power"] or "", 1))
        power = -power if factor["per"] else power
        quantity, size = known
        quantity, scale = ("length", 3) if quantity == "volume" else (quantity, 1)
        dimensions[quantity] = dimensions.get(quantity, 0) + power * scale
        sizes.append(f"({size})^{{{power}}}")
    return Unit(tuple(sorted(dimensions.items())), r" \cdot ".join(sizes))
