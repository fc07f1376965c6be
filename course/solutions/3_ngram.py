"""Task 3, solved."""


class Ngram:
    def open(self, prompt: list[int]) -> dict:
        state = {"text": [], "follows": {}}
        self.observe(state, prompt)
        return state

    def propose(self, state: dict, max_tokens: int) -> list[int]:
        start = state["follows"].get(tuple(state["text"][-2:]))
        if start is None:
            return []
        return state["text"][start : start + max_tokens]

    def observe(self, state: dict, tokens: list[int]) -> None:
        text = state["text"]
        for token in tokens:
            if len(text) >= 2:
                state["follows"][tuple(text[-2:])] = len(text)
            text.append(token)
