"""A small inventory: items, stock movements and reports."""

from __future__ import annotations

import csv
import datetime
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Item:
    """One article that is kept in stock."""

    sku: str
    name: str
    price: float
    quantity: int = 0
    tags: list[str] = field(default_factory=list)

    def value(self) -> float:
        """What the stock of this item is worth."""
        return self.price * self.quantity


@dataclass
class Movement:
    """A change of stock: positive when goods arrive, negative when they leave."""

    sku: str
    amount: int
    day: datetime.date
    note: str = ""


class Inventory:
    """All items and the movements that led to their quantities."""

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        self.movements: list[Movement] = []

    def add(self, item: Item) -> None:
        """Register a new item."""
        if item.sku in self.items:
            raise KeyError(f"{item.sku} is already registered")
        self.items[item.sku] = item

    def find(self, sku: str) -> Item:
        """The item with this number."""
        if sku not in self.items:
            raise KeyError(f"there is no item {sku}")
        return self.items[sku]

    def receive(self, sku: str, amount: int, day: datetime.date, note: str = "") -> None:
        """Goods arrive."""
        if amount <= 0:
            raise ValueError(f"amount must be positive, got {amount}")
        self.find(sku).quantity += amount
        self.movements.append(Movement(sku, amount, day, note))

    def ship(self, sku: str, amount: int, day: datetime.date, note: str = "") -> None:
        """Goods leave."""
        if amount <= 0:
            raise ValueError(f"amount must be positive, got {amount}")
        item = self.find(sku)
        if item.quantity < amount:
            raise ValueError(f"only {item.quantity} of {sku} in stock, wanted {amount}")
        item.quantity -= amount
        self.movements.append(Movement(sku, -amount, day, note))

    def total_value(self) -> float:
        """What the whole stock is worth."""
        total = 0.0
        for item in self.items.values():
            total += item.value()
        return total

    def with_tag(self, tag: str) -> list[Item]:
        """All items that carry a tag, by name."""
        found = [item for item in self.items.values() if tag in item.tags]
        return sorted(found, key=lambda item: item.name)

    def low_stock(self, limit: int) -> list[Item]:
        """Items of which fewer than `limit` are left."""
        found = []
        for item in self.items.values():
            if item.quantity < limit:
                found.append(item)
        return found

    def history(self, sku: str) -> list[Movement]:
        """All movements of one item, oldest first."""
        found = [movement for movement in self.movements if movement.sku == sku]
        return sorted(found, key=lambda movement: movement.day)

    def save(self, path: Path) -> None:
        """Write items and movements to a JSON file."""
        data = {
            "items": [asdict(item) for item in self.items.values()],
            "movements": [
                {"sku": m.sku, "amount": m.amount, "day": m.day.isoformat(), "note": m.note} for m in self.movements
            ],
        }
        path.write_text(json.dumps(data, indent=2), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Inventory:
        """Read what `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        inventory = Inventory()
        for entry in data["items"]:
            inventory.add(Item(**entry))
        for entry in data["movements"]:
            day = datetime.date.fromisoformat(entry["day"])
            inventory.movements.append(Movement(entry["sku"], entry["amount"], day, entry["note"]))
        return inventory


def read_items(path: Path) -> list[Item]:
    """Items from a CSV file with the columns sku, name, price, quantity and tags."""
    items = []
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            tags = [tag.strip() for tag in row["tags"].split(";") if tag.strip()]
            items.append(Item(row["sku"], row["name"], float(row["price"]), int(row["quantity"]), tags))
    return items


def report(inventory: Inventory) -> str:
    """A table of all items with their value, the dearest first."""
    lines = [f"{'item':20s} {'quantity':>8s} {'value':>10s}"]
    for item in sorted(inventory.items.values(), key=lambda item: -item.value()):
        lines.append(f"{item.name:20s} {item.quantity:8d} {item.value():10.2f}")
    lines.append(f"{'total':20s} {'':8s} {inventory.total_value():10.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    stock = Inventory()
    stock.add(Item("A1", "hammer", 12.5, 4, ["tools"]))
    stock.add(Item("B2", "nails", 0.05, 900, ["small"]))
    stock.receive("A1", 6, datetime.date(2024, 3, 1), "restocked")
    stock.ship("B2", 100, datetime.date(2024, 3, 2))
    print(report(stock))
