"""From rows to signals: routes, requests to teachers, and the checks before the first step."""
