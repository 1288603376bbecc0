"""Tables for households: the receptacles in each kind of room, where each object may lie, and the kinds of task.

Receptacles, objects, their places and what may be done with them are a subset of ALFWorld 0.4.2 (`gen/constants.py`).
The kinds of task and their sentences are all those of ALFWorld that its text engine plays (`gen/goal_library.py`). Both
are compared by `make envs`. How many of each receptacle a room has, and which objects belong to it, is our choice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args


@dataclass(frozen=True)
class Room:
    """A kind of room.

    Attributes:
        receptacles: the greatest number of each type of receptacle.
        places: the receptacles in which an object may lie, by object.
    """

    receptacles: Mapping[str, int]
    places: Mapping[str, tuple[str, ...]]


def _table(text: str) -> dict[str, tuple[str, ...]]:
    """Parse lines of the form "NAME: WORD WORD ..."."""
    lines = (line.split(": ") for line in text.strip().splitlines())
    return {name: tuple(words.split()) for name, words in lines}


ROOMS: Mapping[str, Room] = {
    "Kitchen": Room(
        {
            "Cabinet": 6,
            "CoffeeMachine": 1,
            "CounterTop": 3,
            "DiningTable": 1,
            "Drawer": 6,
            "Fridge": 1,
            "GarbageCan": 1,
            "Microwave": 1,
            "Shelf": 3,
            "SideTable": 1,
            "SinkBasin": 1,
            "StoveBurner": 4,
        },
        _table("""
Apple: CounterTop DiningTable Fridge GarbageCan Microwave SideTable SinkBasin
Bowl: Cabinet CounterTop DiningTable Fridge Microwave Shelf SideTable SinkBasin
Bread: CounterTop DiningTable Fridge GarbageCan Microwave SideTable
ButterKnife: CounterTop DiningTable Drawer SideTable SinkBasin
Cup: Cabinet CounterTop DiningTable Fridge Microwave Shelf SideTable SinkBasin
DishSponge: Cabinet CounterTop DiningTable Drawer GarbageCan Shelf SideTable SinkBasin
Egg: CounterTop DiningTable Fridge GarbageCan Microwave SideTable SinkBasin
Fork: CounterTop DiningTable Drawer SideTable SinkBasin
Kettle: Cabinet CounterTop DiningTable Shelf SideTable SinkBasin StoveBurner
Knife: CounterTop DiningTable Drawer SideTable SinkBasin
Ladle: Cabinet CounterTop DiningTable Drawer SideTable SinkBasin
Lettuce: CounterTop DiningTable Fridge GarbageCan SideTable SinkBasin
Mug: Cabinet CoffeeMachine CounterTop DiningTable Fridge Microwave Shelf SideTable SinkBasin
Pan: Cabinet CounterTop DiningTable Fridge SideTable SinkBasin StoveBurner
PepperShaker: Cabinet CounterTop DiningTable Drawer Shelf SideTable
Plate: Cabinet CounterTop DiningTable Fridge Microwave Shelf SideTable SinkBasin
Pot: Cabinet CounterTop DiningTable Fridge Shelf SideTable SinkBasin StoveBurner
Potato: CounterTop DiningTable Fridge GarbageCan Microwave SideTable SinkBasin
SaltShaker: Cabinet CounterTop DiningTable Drawer Shelf SideTable
SoapBottle: Cabinet CounterTop DiningTable Drawer GarbageCan Shelf SideTable
Spatula: CounterTop DiningTable Drawer SideTable SinkBasin
Spoon: CounterTop DiningTable Drawer SideTable SinkBasin
Tomato: CounterTop DiningTable Fridge GarbageCan Microwave SideTable SinkBasin
WineBottle: Cabinet CounterTop DiningTable Fridge GarbageCan Shelf SideTable
"""),
    ),
    "LivingRoom": Room(
        {
            "ArmChair": 2,
            "Cabinet": 4,
            "CoffeeTable": 2,
            "DiningTable": 1,
            "Drawer": 5,
            "Dresser": 1,
            "GarbageCan": 1,
            "Ottoman": 1,
            "Safe": 1,
            "Shelf": 4,
            "SideTable": 2,
            "Sofa": 1,
        },
        _table("""
Book: ArmChair Cabinet CoffeeTable DiningTable Drawer Dresser Ottoman Shelf SideTable Sofa
CellPhone: ArmChair CoffeeTable DiningTable Drawer Dresser Ottoman Safe Shelf SideTable Sofa
CreditCard: ArmChair CoffeeTable DiningTable Drawer Dresser Ottoman Safe Shelf SideTable Sofa
KeyChain: ArmChair CoffeeTable DiningTable Drawer Dresser Ottoman Safe Shelf SideTable Sofa
Laptop: ArmChair CoffeeTable DiningTable Dresser Ottoman SideTable Sofa
Newspaper: ArmChair Cabinet CoffeeTable DiningTable Drawer Dresser GarbageCan Ottoman Shelf SideTable Sofa
Pillow: ArmChair Ottoman Sofa
RemoteControl: ArmChair CoffeeTable DiningTable Drawer Dresser Ottoman Shelf SideTable Sofa
Statue: CoffeeTable DiningTable Dresser Safe Shelf SideTable
TissueBox: Cabinet CoffeeTable DiningTable Drawer Dresser GarbageCan Shelf SideTable
Vase: Cabinet CoffeeTable DiningTable Dresser Safe Shelf SideTable
Watch: CoffeeTable DiningTable Drawer Dresser Safe Shelf SideTable
WateringCan: Cabinet CoffeeTable DiningTable Drawer Dresser Shelf SideTable
"""),
    ),
    "Bedroom": Room(
        {
            "ArmChair": 1,
            "Bed": 1,
            "Cabinet": 2,
            "Desk": 2,
            "Drawer": 6,
            "Dresser": 1,
            "GarbageCan": 1,
            "LaundryHamper": 1,
            "Safe": 1,
            "Shelf": 5,
            "SideTable": 2,
        },
        _table("""
AlarmClock: Desk Dresser Shelf SideTable
BaseballBat: Bed SideTable
BasketBall: ArmChair Bed Desk Dresser SideTable
Book: ArmChair Bed Cabinet Desk Drawer Dresser Shelf SideTable
CD: Cabinet Desk Drawer Dresser GarbageCan Safe Shelf SideTable
CellPhone: ArmChair Bed Desk Drawer Dresser Safe Shelf SideTable
Cloth: ArmChair Cabinet Desk Drawer Dresser GarbageCan LaundryHamper Shelf SideTable
CreditCard: ArmChair Desk Drawer Dresser Safe Shelf SideTable
KeyChain: ArmChair Desk Drawer Dresser Safe Shelf SideTable
Laptop: ArmChair Bed Desk Dresser SideTable
Mug: Cabinet Desk Dresser Shelf SideTable
Pen: Desk Drawer Dresser GarbageCan Shelf SideTable
Pencil: Desk Drawer Dresser GarbageCan Shelf SideTable
Pillow: ArmChair Bed
TennisRacket: Bed Desk Dresser SideTable
TissueBox: Cabinet Desk Drawer Dresser GarbageCan Shelf SideTable
"""),
    ),
    "Bathroom": Room(
        {
            "BathtubBasin": 1,
            "Cabinet": 4,
            "Cart": 1,
            "CounterTop": 2,
            "Drawer": 5,
            "GarbageCan": 1,
            "Shelf": 3,
            "SideTable": 1,
            "SinkBasin": 2,
            "Toilet": 1,
        },
        _table("""
Candle: Cabinet Cart CounterTop Drawer Shelf SideTable Toilet
Cloth: BathtubBasin Cabinet Cart CounterTop Drawer GarbageCan Shelf SideTable SinkBasin Toilet
DishSponge: BathtubBasin Cabinet Cart CounterTop Drawer GarbageCan Shelf SideTable SinkBasin Toilet
HandTowel: BathtubBasin Cabinet Cart CounterTop Drawer GarbageCan Shelf SideTable SinkBasin Toilet
SoapBar: BathtubBasin Cabinet Cart CounterTop Drawer GarbageCan Shelf SideTable SinkBasin Toilet
SoapBottle: Cabinet Cart CounterTop Drawer GarbageCan Shelf SideTable Toilet
SprayBottle: Cabinet Cart CounterTop Drawer GarbageCan Shelf SideTable Toilet
TissueBox: Cabinet Cart CounterTop Drawer GarbageCan Shelf SideTable Toilet
ToiletPaper: Cabinet Cart CounterTop Drawer GarbageCan Shelf SideTable Toilet
"""),
    ),
}

Kind = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
"""A kind of task, as ALFWorld names it."""
KINDS: tuple[Kind, ...] = get_args(Kind)
LIGHT, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"
TREATMENTS: Mapping[str, str] = {
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
}
"""What must be done with the object before it is put down, for the kinds of task that require it."""
SENTENCES: Mapping[str, tuple[str, str]] = {
    "pick_and_place_simple": ("put a {obj} in {recep}", "put some {obj} on {recep}"),
    "pick_clean_then_place_in_recep": ("put a clean {obj} in {recep}", "clean some {obj} and put it in {recep}"),
    "pick_heat_then_place_in_recep": ("put a hot {obj} in {recep}", "heat some {obj} and put it in {recep}"),
    "pick_cool_then_place_in_recep": ("put a cool {obj} in {recep}", "cool some {obj} and put it in {recep}"),
    TWO: ("put two {obj} in {recep}", "find two {obj} and put them in {recep}"),
    LIGHT: ("look at {obj} under the {toggle}", "examine the {obj} with the {toggle}"),
}
"""Sentences that tell the player the task."""

OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})
APPLIANCES: Mapping[str, str] = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}
"""The appliance for each treatment of an object."""
TREATED: Mapping[str, tuple[str, ...]] = _table("""
clean: Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Kettle Knife Ladle Lettuce Mug Pan Plate Pot \
Potato SoapBar Spatula Spoon Tomato
heat: Apple Bread Cup Egg Mug Plate Potato Tomato
cool: Apple Bowl Bread Cup Egg Lettuce Mug Pan Plate Pot Potato Tomato WineBottle
""")
"""The objects to which each treatment can be applied."""
LIT, LAMP_STANDS = ("LivingRoom", "Bedroom"), ("Dresser", "SideTable")
"""Rooms with a desk lamp, and the receptacles that it may stand on."""
