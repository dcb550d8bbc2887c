"""Words that many messages have."""


def counted(number: int, noun: str) -> str:
    """Such as "1 worker", "2 workers"."""
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"
