"""From rows to signals: routing, requests to teachers, models in this process, verification, and early checks."""
