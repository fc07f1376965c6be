"""Task 1, solved."""


def verify(draft: list[int], choices: list[int]) -> list[int]:
    for i, token in enumerate(draft):
        if token != choices[i]:
            return choices[: i + 1]
    return list(choices)
