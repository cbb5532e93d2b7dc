"""The sample on which the doctor measures where the user gives no texts: prose, code, a table, a dialogue."""

from __future__ import annotations

__all__ = ["SAMPLE"]

SAMPLE = (
    "The harbour was quiet in the early morning. A few boats lay at the pier, and the gulls sat on the"
    " posts and waited. When the first light came over the hills, the men began to load the nets. They spoke"
    " little, because each of them knew what he had to do. By the time the sun had risen, the boats"
    " had left the bay, and only the smell of tar and salt was left behind. The children came down to the"
    " beach and looked for shells, as they did every day in summer.",
    "def mean(values):\n    \"\"\"Return the mean of a list of numbers.\"\"\"\n    if not values:\n"
    "        raise ValueError(\"the list is empty\")\n    total = 0.0\n    for value in values:\n"
    "        total += value\n    return total / len(values)\n\n\ndef variance(values):\n"
    "    \"\"\"Return the variance of a list of numbers.\"\"\"\n    center = mean(values)\n"
    "    return mean([(value - center) ** 2 for value in values])\n",
    "Question: How many days does a leap year have, and when is a year a leap year?\nAnswer: A leap year has"
    " 366 days. A year is a leap year if it can be divided by 4, unless it can be divided by 100. A"
    " year that can be divided by 400 is a leap year, too. So 2000 was a leap year, but 1900 was not.\n"
    "Question: How many hours does a week have?\nAnswer: A week has 7 days of 24 hours each, so"
    " it has 168 hours.",
    "| city | country | river |\n|---|---|---|\n| Paris | France | Seine |\n| London | England | Thames |\n"
    "| Vienna | Austria | Danube |\n| Budapest | Hungary | Danube |\n| Rome | Italy | Tiber |\n"
    "| Cairo | Egypt | Nile |\n| Hamburg | Germany | Elbe |\n| Lisbon | Portugal | Tagus |\n",
)  # fmt: skip
