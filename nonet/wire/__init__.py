"""HTTP formats: a body becomes an Ask, and what was written becomes a body or events. One module per format.

A format module offers a pydantic body with `ask() -> Ask`, and a Reply: `whole` for one body, `begin`, `news` and `end`
for a stream. Knows neither tokenizers nor engines nor the web framework.
"""
