"""Task 3. N-gram: guess by looking up

(Page: http://127.0.0.1:5000/#chapter-5, 5. Be the drafter; #chapter-11, 11. Who guesses?)

The cheapest drafter runs no model. Texts repeat themselves: code, tables, names, an answer that
quotes its prompt. So look how the text went on when it last ended like this:

    text:    … the quick brown fox … the quick
    match:     the quick                           the latest place before where these two stood
    draft:               brown fox …               what followed there

This is prompt lookup (Saxena, 2023). Searching the whole text in each cycle gets slow as it grows.
A dictionary is quick: for each pair of tokens, where did the text go on behind it? Enter a pair
only when the token behind it is known: else the text's last pair would find itself.

One drafter serves many texts at once. So it is an object with three methods, and all that belongs
to one text is in a state, which `open` returns and the others are given. `propose` only guesses,
and the target may reject it all. Then `observe` is told which tokens have really come.

Write `Ngram`. Then: python -m course 3
"""


class Ngram:
    """Drafts what followed the last two tokens the last time.

    state = drafter.open([5, 6, 7, 8])        any kind of object that you like
    drafter.observe(state, [5, 6])            the text is now 5 6 7 8 5 6
    drafter.propose(state, 3) -> [7, 8, 5]    what followed 5 6 before
    drafter.propose(state, 9) -> [7, 8, 5, 6] fewer, as the text ends there
    """

    def open(self, prompt: list[int]) -> object:
        """The state of a new text that begins with the prompt, of at least one token."""
        raise NotImplementedError

    def propose(self, state: object, max_tokens: int) -> list[int]:
        """At most max_tokens tokens; [] if the last two tokens have no earlier match."""
        raise NotImplementedError

    def observe(self, state: object, tokens: list[int]) -> None:
        """These tokens have been appended to the text."""
        raise NotImplementedError
