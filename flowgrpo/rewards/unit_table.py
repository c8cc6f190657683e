"""Units and their spellings, as exact fractions of the base unit of their dimension.

A spelling may stand in two dimensions (a pound is a mass and money); words of three letters and more have a plural.
"""

from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """`base = value * factor + offset`, in its dimension."""

    dimension: str
    factor: Fraction
    offset: Fraction = Fraction(0)


TABLE: dict[str, list[tuple[str, str]]] = {  # dimension: factor and spellings; a spelling may stand in two dimensions
    "length": [
        ("1/1000000000", "nm nanometer nanometre"),
        ("1/1000000", "µm um micrometer micrometre micron"),
        ("1/1000", "mm millimeter millimetre"),
        ("1/100", "cm cms centimeter centimetre"),
        ("1/10", "dm decimeter decimetre"),
        ("1", "m meter metre"),
        ("1000", "km kms kilometer kilometre"),
        ("254/10000", 'in inch inches "'),
        ("3048/10000", "ft foot feet '"),
        ("9144/10000", "yd yard"),
        ("1609344/1000", "mi mile"),
    ],
    "mass": [
        ("1/1000000", "mg milligram milligramme"),
        ("1/1000", "g gram gramme"),
        ("1", "kg kgs kilogram kilogramme kilo"),
        ("1000", "t tonne metric-ton"),
        ("45359237/100000000", "lb lbs pound"),
        ("45359237/1600000000", "oz ounce"),
    ],
    "volume": [
        ("1/1000000", "ml milliliter millilitre cm^3 cc cubic-centimeter cubic-centimetre"),
        ("1/100000", "cl centiliter centilitre"),
        ("1/10000", "dl deciliter decilitre"),
        ("1/1000", "l liter litre dm^3 cubic-decimeter cubic-decimetre"),
        ("1", "m^3 cubic-meter cubic-metre"),
        ("3785411784/1000000000000", "gal gallon"),
        ("16387064/1000000000000", "in^3 cubic-inch cubic-inches"),
        ("28316846592/1000000000000", "ft^3 cubic-foot cubic-feet"),
    ],
    "area": [
        ("1/1000000", "mm^2 square-millimeter square-millimetre sq-mm"),
        ("1/10000", "cm^2 square-centimeter square-centimetre sq-cm"),
        ("1", "m^2 square-meter square-metre sq-m"),
        ("10000", "ha hectare"),
        ("1000000", "km^2 square-kilometer square-kilometre sq-km"),
        ("64516/100000000", "in^2 square-inch square-inches sq-in"),
        ("9290304/100000000", "ft^2 square-foot square-feet sq-ft"),
    ],
    "time": [
        ("1/1000", "ms millisecond"),
        ("1", "s sec second"),
        ("60", "min minute mins"),
        ("3600", "h hr hour hrs"),
        ("86400", "d day"),
        ("604800", "week wk"),
    ],
    "months": [("1", "month"), ("12", "year yr")],
    "speed": [
        ("1", "m/s mps meter/second metre/second"),
        ("1000/3600", "km/h kmh kph kmph kilometer/hour kilometre/hour"),
        ("1609344/3600000", "mph mi/h mile/hour"),
        ("1/100", "cm/s"),
        ("1000", "km/s kilometer/second kilometre/second"),
    ],
    "acceleration": [("1", "m/s^2 meter/second^2 metre/second^2 meter/second/second metre/second/second")],
    "density": [("1", "kg/m^3"), ("1000", "g/cm^3 g/ml kg/l")],
    "angle": [("1", "° deg degree")],
    "force": [("1", "N newton"), ("1000", "kN kilonewton")],
    "energy": [
        ("1", "J joule N*m"),
        ("1000", "kJ kilojoule"),
        ("1000000", "MJ megajoule"),
        ("4184/1000", "cal calorie"),
        ("4184", "kcal kilocalorie"),
        ("3600000", "kWh kilowatt-hour"),
    ],
    "power": [("1/1000", "mW milliwatt"), ("1", "W watt"), ("1000", "kW kilowatt"), ("1000000", "MW megawatt")],
    "pressure": [("1", "Pa pascal N/m^2"), ("1000", "kPa kilopascal"), ("100000", "bar"), ("101325", "atm atmosphere")],
    "frequency": [("1", "Hz hertz"), ("1000", "kHz kilohertz"), ("1000000", "MHz megahertz")],
    "current": [("1/1000", "mA milliampere milliamp"), ("1", "A ampere amp")],
    "voltage": [("1/1000", "mV millivolt"), ("1", "V volt"), ("1000", "kV kilovolt")],
    "resistance": [("1", "Ω ohm"), ("1000", "kΩ kilohm kiloohm")],
    "dollars": [("1", "$ usd us$ dollar us-dollar"), ("1/100", "¢ c cent")],
    "euros": [("1", "€ eur euro"), ("1/100", "cent eurocent")],
    "sterling": [("1", "£ gbp pound quid"), ("1/100", "p pence penny")],
    "rupees": [("1", "₹ inr rs rupee")],
    "yen": [("1", "¥ jpy yen")],
}
TEMPERATURES = {
    "°C C celsius degree-celsius degree-centigrade": Unit("temperature", Fraction(1), Fraction(27315, 100)),
    "°F F fahrenheit degree-fahrenheit": Unit("temperature", Fraction(5, 9), Fraction(45967, 180)),
    "K kelvin °K": Unit("temperature", Fraction(1)),
}
MONEY = ("dollars", "euros", "sterling", "rupees", "yen")
CURRENCIES = ("us$", "$", "€", "£", "₹", "¥", "usd", "eur", "gbp", "inr", "rs.")


def _spellings() -> dict[str, tuple[Unit, ...]]:
    """Every spelling with what it can mean; words also in the plural."""
    found: dict[str, tuple[Unit, ...]] = {}
    rows = [(names, Unit(dimension, Fraction(factor))) for dimension, row in TABLE.items() for factor, names in row]
    for names, unit in rows + list(TEMPERATURES.items()):
        for name in names.split():
            plural = (name + "s",) if len(name) > 2 and name.isascii() and name[-1].isalpha() else ()
            for spelling in (name, *plural):
                found[spelling] = (*found.get(spelling, ()), unit)
    return found


SPELLINGS = _spellings()
LOWER = {spelling.lower(): units for spelling, units in reversed(SPELLINGS.items())}
