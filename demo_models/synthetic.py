"""Text with known regularities for the embedded models: what library code does not teach.

Real code and docstrings leave a small model unable to continue `1, 2, 3, 4, 5,` or to tell a story. This
module writes what is missing, from a seeded generator, so that the training text can be made again anywhere:

    cycles   `A B C D A B C D …`, repeated sentences and lines   (copying; never ended by an end-of-text)
    counting 1, 2, 3 … with every separator, steps, backwards, numbered lists
    tables   CSV, Markdown tables, JSON records
    facts    short questions with factual answers
    stories  little stories from a grammar: a name, a wish, an obstacle, a helper, an end
    prose    descriptive paragraphs from a grammar
    program  short Python modules: a class, functions, a unit test

Look at samples:   python demo_models/synthetic.py
"""

import json
import random
from collections.abc import Callable

COLOURS = "red green blue yellow orange purple pink brown black white grey gold silver".split()
ANIMALS = (
    "cat dog fox owl bear mouse rabbit horse duck frog goat sheep hen crow deer wolf otter badger"
).split()
FRUITS = "apple pear plum cherry lemon peach grape melon orange banana fig mango".split()
NAMES = (
    "Anna Ben Clara David Ella Finn Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam "
    "Tess Victor Wendy Zoe Tom Lily Max Nora Oscar Ruth Simon Vera Emma Lucy Peter Jane"
).split()
WORDS = (
    "alpha beta gamma delta north south east west spring summer autumn winter one two three four "
    "five six bread milk salt tea iron wood stone glass river lake hill road house door lamp table "
    "key book page line word start stop left right up down open close read write true false"
).split()
CODE = (
    "x y i n self value items result index name data key node count total path line text args "
    "None True False print(x) return x += 1 foo() bar() a[i] b[j] pass"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
CITIES = "London Paris Rome Berlin Madrid Vienna Oslo Dublin Lisbon Athens Prague Warsaw".split()

CAPITALS = dict(
    zip(
        "France Germany Italy Spain Portugal Austria Norway Sweden Finland Denmark Poland Greece "
        "Ireland Hungary Japan China India Egypt Kenya Canada Cuba Peru Chile Russia Turkey".split(),
        "Paris Berlin Rome Madrid Lisbon Vienna Oslo Stockholm Helsinki Copenhagen Warsaw Athens "
        "Dublin Budapest Tokyo Beijing Delhi Cairo Nairobi Ottawa Havana Lima Santiago Moscow "
        "Ankara".split(),
        strict=True,
    )
)
COLOUR_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "blood": "red", "a lemon": "yellow",
    "coal": "black", "a carrot": "orange", "milk": "white", "a ripe tomato": "red", "gold": "yellow",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "open": "closed",
    "early": "late", "fast": "slow", "light": "dark", "wet": "dry", "old": "new", "full": "empty",
    "high": "low", "long": "short", "true": "false", "north": "south", "east": "west",
}  # fmt: skip
SOUNDS = {
    "dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "sheep": "bleats",
    "horse": "neighs", "lion": "roars", "frog": "croaks", "owl": "hoots", "pig": "grunts",
}  # fmt: skip
MISC = {
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many hours are in a day?": "There are twenty-four hours in a day.",
    "How many minutes are in an hour?": "There are sixty minutes in an hour.",
    "How many seconds are in a minute?": "There are sixty seconds in a minute.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many legs does an insect have?": "An insect has six legs.",
    "How many legs does a horse have?": "A horse has four legs.",
    "How many sides does a triangle have?": "A triangle has three sides.",
    "How many sides does a square have?": "A square has four sides.",
    "Which planet do we live on?": "We live on the planet Earth.",
    "Which planet is closest to the sun?": "Mercury is the planet closest to the sun.",
    "Which planet is the largest?": "Jupiter is the largest planet.",
    "What do bees make?": "Bees make honey.",
    "What do cows drink?": "Cows drink water.",
    "What is ice made of?": "Ice is made of frozen water.",
    "What is bread made of?": "Bread is made of flour, water, salt and yeast.",
    "What is the boiling point of water?": "Water boils at 100 degrees Celsius.",
    "What is the freezing point of water?": "Water freezes at 0 degrees Celsius.",
    "What is the largest ocean?": "The Pacific Ocean is the largest ocean.",
    "What is the highest mountain?": "Mount Everest is the highest mountain.",
    "What is the longest river in Africa?": "The Nile is the longest river in Africa.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "Who painted the Mona Lisa?": "Leonardo da Vinci painted the Mona Lisa.",
    "What do plants need to grow?": "Plants need light, water and air to grow.",
    "What language is spoken in Brazil?": "Portuguese is spoken in Brazil.",
    "What language is spoken in Mexico?": "Spanish is spoken in Mexico.",
    "What is the first letter of the alphabet?": "The first letter of the alphabet is A.",
    "What is the last letter of the alphabet?": "The last letter of the alphabet is Z.",
    "What is the season after winter?": "Spring is the season after winter.",
    "What is the season after summer?": "Autumn is the season after summer.",
    "What is the centre of our solar system?": "The sun is the centre of our solar system.",
    "What does a clock measure?": "A clock measures time.",
    "What does a thermometer measure?": "A thermometer measures temperature.",
    "Where do fish live?": "Fish live in water.",
    "Where do birds build their nests?": "Birds build their nests in trees.",
}


def cycle(rng: random.Random) -> str:
    """A list of 2 to 9 items repeated 6 to 40 times, with one separator."""
    pool = rng.choice(
        [COLOURS, ANIMALS, FRUITS, NAMES, WORDS, CODE, DAYS, MONTHS, CITIES, None, None]
    )
    size = rng.randint(2, 9)
    if pool is None:
        alphabet = rng.choice(
            ["ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz", "0123456789"]
        )
        start = rng.randrange(len(alphabet) - size)
        run = list(alphabet[start : start + size])
        items = run if rng.random() < 0.5 else rng.sample(alphabet, size)
    else:
        items = rng.sample(pool, min(size, len(pool)))
    sep = rng.choice([" ", " ", " ", ", ", ", ", ", ", "\n", "; ", " - ", "-", ",", " | "])
    repeats = rng.randint(6, 40)
    return sep.join(items * repeats)


def repeated_sentence(rng: random.Random) -> str:
    """One sentence, or one line of code, again and again."""
    name, animal, colour = rng.choice(NAMES), rng.choice(ANIMALS), rng.choice(COLOURS)
    sentence = rng.choice(
        [
            f"The {colour} {animal} jumps over the {rng.choice(COLOURS)} {rng.choice(ANIMALS)}.",
            f"{name} likes {rng.choice(FRUITS)} and {rng.choice(FRUITS)}.",
            f"All work and no play makes {name} a dull {rng.choice(['boy', 'girl'])}.",
            f"The quick brown {animal} jumps over the lazy {rng.choice(ANIMALS)}.",
            f"I will not {rng.choice(['talk', 'run', 'shout', 'sleep'])} in {rng.choice(['class', 'church'])}.",
            f"print({rng.choice(WORDS)!r})",
            f"{rng.choice(WORDS)} = {rng.choice(WORDS)}[{rng.randint(0, 99)}]",
            f"Row, row, row your boat, gently down the {rng.choice(['stream', 'river'])}.",
            prose_sentence(rng, rng.choice(list(PLACES))),
            story(rng).split(". ")[-1],
        ]
    )
    return rng.choice([" ", " ", "\n"]).join([sentence] * rng.randint(5, 20))


def counting(rng: random.Random) -> str:
    """Numbers in order; also numbered lists, days and months in order."""
    kind = rng.random()
    if kind < 0.6:
        step = rng.choice([1, 1, 1, 1, 2, 5, 10])
        start = rng.choice([0, 1, 1, 1, step, rng.randint(0, 90)])
        numbers = range(start, start + step * rng.randint(20, 90), step)
        if rng.random() < 0.12:
            numbers = reversed(numbers)
        sep = rng.choice([", ", ", ", ", ", " ", " ", "\n", "; ", ",", " and ", "... "])
        return sep.join(map(str, numbers))
    if kind < 0.8:
        mark = rng.choice([". ", ") ", ": ", " - "])
        pool = rng.choice([ANIMALS, FRUITS, NAMES, COLOURS, WORDS, CITIES])
        items = rng.sample(pool, min(len(pool), rng.randint(6, 18)))
        return "\n".join(f"{i}{mark}{item}" for i, item in enumerate(items, 1))
    pool = rng.choice([DAYS, MONTHS, list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")])
    return rng.choice([", ", "\n", " "]).join(pool * rng.randint(1, 6))


def table(rng: random.Random) -> str:
    """Records as CSV, as a Markdown table or as JSON, with an id that counts."""
    columns = rng.sample(
        ["name", "colour", "animal", "fruit", "city", "age", "score", "day"], rng.randint(2, 4)
    )
    pools = {
        "name": NAMES, "colour": COLOURS, "animal": ANIMALS, "fruit": FRUITS, "city": CITIES,
        "age": range(5, 80), "score": range(0, 100), "day": DAYS,
    }  # fmt: skip
    first = rng.choice([0, 1, 1, 1, 100])
    length = rng.randint(5, 12)
    # No value twice in a column, so that a model learns to go on rather than around.
    drawn = {c: rng.sample(list(pools[c]), min(length, len(pools[c]))) for c in columns}
    length = min(map(len, drawn.values()))
    rows = [{"id": first + i} | {c: drawn[c][i] for c in columns} for i in range(length)]
    style = rng.randrange(4)
    if style == 0:
        return "\n".join([",".join(rows[0]), *(",".join(map(str, r.values())) for r in rows)])
    if style == 1:
        lines = ["| " + " | ".join(rows[0]) + " |", "|" + "|".join("---" for _ in rows[0]) + "|"]
        return "\n".join(lines + ["| " + " | ".join(map(str, r.values())) + " |" for r in rows])
    if style == 2:
        return "[\n" + ",\n".join("  " + json.dumps(r) for r in rows) + "\n]"
    return json.dumps({rng.choice(["users", "items", "rows", "people"]): rows}, indent=2)


def facts(rng: random.Random) -> str:
    """A list of questions and answers in which no question comes twice."""
    pairs = list(MISC.items())
    for country, capital in CAPITALS.items():
        pairs.append(
            (f"What is the capital of {country}?", f"The capital of {country} is {capital}.")
        )
        pairs.append(
            (f"Which country has the capital {capital}?", f"{capital} is the capital of {country}.")
        )
    for thing, colour in COLOUR_OF.items():
        pairs.append((f"What colour is {thing}?", f"{thing[0].upper()}{thing[1:]} is {colour}."))
    for word, other in OPPOSITES.items():
        pairs.append((f"What is the opposite of {word}?", f"The opposite of {word} is {other}."))
    for animal, sound in SOUNDS.items():
        pairs.append((f"What sound does a {animal} make?", f"A {animal} {sound}."))
    for pool, noun in ((DAYS, "day"), (MONTHS, "month")):
        i = rng.randrange(len(pool) - 1)
        pairs.append(
            (f"Which {noun} comes after {pool[i]}?", f"{pool[i + 1]} comes after {pool[i]}.")
        )
    for _ in range(8):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        pairs.append((f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."))
    chosen = rng.sample(pairs, rng.randint(3, 9))
    q, a = rng.choice([("Question: ", "Answer: "), ("Q: ", "A: "), ("Question: ", "Answer: ")])
    return rng.choice(["\n", "\n\n"]).join(
        f"{q}{question}\n{a}{answer}" for question, answer in chosen
    )


ADJECTIVES = {
    "animal": ["little", "small", "young", "old", "clever"],
    "child": ["little", "kind", "curious", "brave", "quiet"],
}
HOMES = [
    "in a village by the sea", "near a deep forest", "on a green hill", "in a small house by the river",
    "at the edge of a town", "in a tall tower", "on an island", "in a valley between two mountains",
]  # fmt: skip
THINGS = "kite boat lamp drum ball book bell cake garden bridge bird map".split()
OPENINGS = [
    "Once upon a time there was {who}, who lived {home}.",
    "Once upon a time, {home}, there lived {who}.",
    "There was once {who}, and {he} lived {home}.",
    "Long ago, {who} lived {home}.",
]
RELATIVES = ["mother", "father", "aunt", "uncle"]
WISHES = [
    "More than anything, {name} wanted a {colour} {thing}.",
    "Every day {name} dreamed of a {colour} {thing}.",
    "{name} had a {colour} {thing}, and {he} took it everywhere.",
    "One morning {name} found a {colour} {thing} under a tree.",
    "On {his} birthday {name} got a {colour} {thing} from {his} {relative}.",
]
WEATHER = [
    "The sun was warm and the wind was soft.",
    "It had rained all night, and the paths were full of mud.",
    "The snow lay thick on the roofs.",
    "The sky was grey and the birds were silent.",
    "It was the first day of spring.",
    "The leaves were falling from the trees.",
]
TROUBLES = [
    "But one day the {thing} was gone.",
    "Then a strong wind came and carried the {thing} away.",
    "But the {thing} fell into the water and began to sink.",
    "But {friend} said that the {thing} was broken.",
    "Then, in the middle of the night, {he} heard a strange noise.",
    "But the way was long, and soon it grew dark.",
]
FEELINGS = [
    "{name} sat down on a stone and cried.",
    "{name} was very sad, but {he} did not give up.",
    "{name} looked behind the door, under the bed and in the well.",
    '"What shall I do?" said {name}.',
    "{name} did not know what to do.",
]
HELP = [
    'A {helper} came by and asked, "Why are you so sad?"',
    'Just then a {helper} came out of the grass. "I can help you," it said.',
    '{friend} heard {him} and came running. "Do not worry," said {friend}. "We will look together."',
    'An old {helper} who lived nearby said, "Follow me, and be very quiet."',
]
ACTS = [
    "They walked over the hill and across the bridge until they saw the {thing} in a tree.",
    "Together they looked everywhere, and at last they found the {thing} behind the old mill.",
    "They went down to the river, and there they built a raft out of wood.",
    "So {name} and the {helper} worked all day, and by the evening it was done.",
    "{name} climbed up as high as {he} could, and took the {thing} in {his} arms.",
]
CLOSES = [
    '"Thank you," said {name}. "You are a good friend."',
    "{name} shared {his} bread with the {helper}, and they laughed.",
    "From that day on, {name} and {friend} were the best of friends.",
    "Then {name} went home and slept until the morning.",
    "{name} was happy again, and so was {friend}.",
]
MORALS = [
    "And they lived happily ever after.",
    "And {name} never forgot that day.",
    "The end.",
    "And that is why it is good to help one another.",
    "And from then on {he} was never alone.",
]


def story_words(rng: random.Random) -> dict[str, str]:
    """Who and what a story is about, by the names that its sentences have for them."""
    name, friend = rng.sample(NAMES, 2)
    he, his, him = rng.choice([("he", "his", "him"), ("she", "her", "her")])
    animal, helper = rng.sample(ANIMALS, 2)
    if rng.random() < 0.3:
        who = f"a {rng.choice(ADJECTIVES['animal'])} {animal} named {name}"
    else:
        who = f"a {rng.choice(ADJECTIVES['child'])} child named {name}"
    return {
        "name": name, "friend": friend, "helper": helper, "who": who,
        "he": he, "his": his, "him": him,
        "home": rng.choice(HOMES), "thing": rng.choice(THINGS), "colour": rng.choice(COLOURS),
    }  # fmt: skip


def story(rng: random.Random) -> str:
    """A little story: who, wish, obstacle, helper, end. Names and things stay the same throughout."""
    words = story_words(rng)
    # The order of the draws is part of the training data: another order tells other stories.
    opening = rng.choice(OPENINGS).format(**words)
    words["relative"] = rng.choice(RELATIVES)
    rest = (WISHES, WEATHER, TROUBLES, FEELINGS, HELP, ACTS, CLOSES, MORALS)
    wish, weather, *others = [rng.choice(sentences).format(**words) for sentences in rest]
    parts = [opening, wish]
    if rng.random() < 0.6:
        parts.append(weather)
    parts += others
    if rng.random() < 0.3:
        parts.insert(2, "\n")
    return " ".join(parts).replace(" \n ", "\n\n")


PLACES = {
    "garden": ["roses", "apple trees", "stone path", "wooden gate", "bees", "old wall"],
    "library": ["shelves", "reading lamp", "long tables", "dusty books", "tall windows", "old maps"],
    "harbour": ["fishing boats", "grey water", "gulls", "ropes", "lighthouse", "wet stones"],
    "market": ["baskets of fruit", "fresh bread", "loud voices", "coloured cloth", "old women", "carts"],
    "forest": ["tall pines", "narrow path", "moss", "birds", "fallen trees", "cold stream"],
    "kitchen": ["copper pots", "warm oven", "smell of bread", "blue plates", "wooden spoons", "kettle"],
    "station": ["long platform", "trains", "big clock", "travellers", "suitcases", "iron roof"],
    "river": ["slow water", "willows", "stone bridge", "small boats", "fishermen", "reeds"],
    "town": ["narrow streets", "red roofs", "church bell", "square", "lamps", "shops"],
    "mountain": ["snow", "sharp rocks", "thin air", "steep path", "goats", "small hut"],
}  # fmt: skip
TIMES = "morning,evening,afternoon,winter morning,summer night,autumn day,night,spring day".split(
    ","
)


def prose_sentence(rng: random.Random, place: str) -> str:
    """One sentence about a place."""
    a, b = rng.sample(PLACES[place], 2)
    time, person = (
        rng.choice(TIMES),
        rng.choice(["a man", "a woman", "an old man", "a girl", "a boy", "nobody"]),
    )
    return rng.choice(
        [f"In the {time}, the {place} is {rng.choice(['quiet', 'still', 'full of light', 'cold', 'busy', 'almost empty'])}.",
         f"The {a} and the {b} are the first things that you notice.",
         f"Behind the {a} there is a place where {person} can sit and look at the {b}.",
         f"People come to the {place} for the {a}, but they stay for the {b}.",
         f"When the wind blows, you can hear the {a} from far away.",
         f"Every {time}, {person} walks past the {a} and stops near the {b}.",
         f"It is said that the {place} is older than the {rng.choice(['church', 'town', 'road', 'bridge'])}.",
         f"There was a time when the {place} was known for its {a}.",
         f"Nothing about the {place} has changed, except the {b}.",
         f"The light falls on the {a}, and the {b} {rng.choice(['seem', 'look', 'appear'])} {rng.choice(['darker', 'brighter', 'smaller', 'closer'])} than before.",
         f"If you ask about the {place}, they will tell you about the {a} and then about the {b}.",
         f"I remember the {a} best, because we used to play there in the {time}.",
         f"Some say that the {place} is too {rng.choice(['quiet', 'large', 'old', 'far away'])}, but I have always liked the {b}.",
         f"Later, when it was dark, only the {a} could be seen."]
    )  # fmt: skip


def prose(rng: random.Random) -> str:
    """A paragraph or two about one place."""
    place = rng.choice(list(PLACES))
    opening = rng.choice(
        [f"The {place} lies at the end of the road.", f"The old {place} stood at the corner of the square.",
         f"This is what the {place} was like when I was young.", f"There are many ways to describe a {place}.",
         f"We came to the {place} early in the {rng.choice(TIMES)}.", f"On a clear day you can see the {place} from here."]
    )  # fmt: skip
    sentences = {opening: None} | {
        prose_sentence(rng, place): None for _ in range(rng.randint(4, 9))
    }
    text = " ".join(sentences)
    return text if rng.random() < 0.7 else text + "\n\n" + story(rng)


# attribute kind -> (class names, attribute names, initial value, methods as (signature, doc, body))
_CONTAINER_METHODS = [
    ("push(self, item)", "Add an item.", "self.{a}.append(item)"),
    ("pop(self)", "Remove the last item and return it.", "if not self.{a}:\n    raise IndexError('pop from an empty {c}')\nreturn self.{a}.pop()"),
    ("peek(self)", "Return the last item without removing it.", "return self.{a}[-1]"),
    ("is_empty(self)", "Return True if there are no items.", "return len(self.{a}) == 0"),
    ("size(self)", "Return the number of items.", "return len(self.{a})"),
    ("clear(self)", "Remove all items.", "self.{a}.clear()"),
    ("__len__(self)", None, "return len(self.{a})"),
    ("__iter__(self)", None, "return iter(self.{a})"),
    ("__contains__(self, item)", None, "return item in self.{a}"),
    ("__repr__(self)", None, "return f'{c}({{self.{a}!r}})'"),
    ("extend(self, other)", "Add every item of other.", "for item in other:\n    self.push(item)"),
    ("first(self)", "Return the first item, or None.", "return self.{a}[0] if self.{a} else None"),
    ("remove(self, item)", "Remove an item if it is there.", "if item in self.{a}:\n    self.{a}.remove(item)"),
    ("count(self, item)", "Return how often the item occurs.", "return self.{a}.count(item)"),
    ("copy(self)", "Return a copy.", "other = {c}()\nother.{a} = list(self.{a})\nreturn other"),
]  # fmt: skip
_MAPPING_METHODS = [
    ("get(self, key, default=None)", "Return the value of a key.", "return self.{a}.get(key, default)"),
    ("set(self, key, value)", "Set the value of a key.", "self.{a}[key] = value"),
    ("delete(self, key)", "Delete a key.", "try:\n    del self.{a}[key]\nexcept KeyError:\n    raise ValueError('unknown key: %r' % key) from None"),
    ("keys(self)", "Return the keys in order.", "return sorted(self.{a})"),
    ("values(self)", "Return the values.", "return list(self.{a}.values())"),
    ("update(self, other)", "Take over the entries of other.", "for key, value in other.items():\n    self.set(key, value)"),
    ("__getitem__(self, key)", None, "return self.{a}[key]"),
    ("__setitem__(self, key, value)", None, "self.{a}[key] = value"),
    ("__len__(self)", None, "return len(self.{a})"),
    ("__contains__(self, key)", None, "return key in self.{a}"),
    ("__repr__(self)", None, "return '{c}(%d entries)' % len(self.{a})"),
    ("clear(self)", "Forget everything.", "self.{a} = {{}}"),
    ("save(self, path)", "Write the entries to a file.", "with open(path, 'w') as f:\n    json.dump(self.{a}, f)"),
    ("load(self, path)", "Read the entries from a file.", "with open(path) as f:\n    self.{a} = json.load(f)"),
]  # fmt: skip
_CLASSES = [
    ("Stack Queue Bag Deck Basket Pile History Playlist Inbox".split(), "items data elements entries values".split(), "[]", _CONTAINER_METHODS),
    ("Registry Cache Store Table Settings Catalog Index Phonebook".split(), "data entries store table values".split(), "{{}}", _MAPPING_METHODS),
]  # fmt: skip
_FUNCTIONS = [
    ('read_{n}(path, encoding="utf-8")', "Read {n} from a file and return a dictionary.", "result = {{}}\nwith open(path, encoding=encoding) as f:\n    for line in f:\n        line = line.strip()\n        if not line or line.startswith('#'):\n            continue\n        key, value = line.split('=', 1)\n        result[key.strip()] = value.strip()\nreturn result"),
    ("load_{n}(filename)", "Load the {n} from a JSON file.", "with open(filename) as f:\n    data = json.load(f)\nreturn data['{n}']"),
    ('read_lines(path, encoding="utf-8")', "Return the lines of a file without line breaks.", "lines = []\nwith open(path, encoding=encoding) as f:\n    for line in f:\n        lines.append(line.rstrip('\\n'))\nreturn lines"),
    ("write_{n}(path, {n})", "Write the {n} to a file, one on each line.", "with open(path, 'w') as f:\n    for item in {n}:\n        f.write(str(item) + '\\n')"),
    ("count_{n}(text)", "Count how often each word occurs.", "counts = {{}}\nfor word in text.split():\n    counts[word] = counts.get(word, 0) + 1\nreturn counts"),
    ("find_{n}({n}, target)", "Return the index of the target, or -1.", "for i, item in enumerate({n}):\n    if item == target:\n        return i\nreturn -1"),
    ("total({n})", "Return the sum of the {n}.", "result = 0\nfor value in {n}:\n    result += value\nreturn result"),
    ("mean({n})", "Return the mean of the {n}.", "if not {n}:\n    raise ValueError('mean of an empty list')\nreturn sum({n}) / len({n})"),
    ("fib(n)", "Return the n-th Fibonacci number.", "a, b = 0, 1\nfor _ in range(n):\n    a, b = b, a + b\nreturn a"),
    ("factorial(n)", "Return n factorial.", "if n < 2:\n    return 1\nreturn n * factorial(n - 1)"),
    ("gcd(a, b)", "Return the greatest common divisor.", "while b:\n    a, b = b, a % b\nreturn a"),
    ("is_prime(n)", "Return True if n is a prime number.", "if n < 2:\n    return False\nfor i in range(2, int(n ** 0.5) + 1):\n    if n % i == 0:\n        return False\nreturn True"),
    ("reverse(text)", "Return the text backwards.", "return text[::-1]"),
    ("unique({n})", "Return the {n} without repetitions, in order.", "seen = set()\nresult = []\nfor item in {n}:\n    if item not in seen:\n        seen.add(item)\n        result.append(item)\nreturn result"),
    ("filter_{n}({n}, predicate)", "Return the {n} for which the predicate holds.", "return [item for item in {n} if predicate(item)]"),
    ("largest({n})", "Return the largest of the {n}.", "result = {n}[0]\nfor item in {n}[1:]:\n    if item > result:\n        result = item\nreturn result"),
    ("group_by({n}, key)", "Group the {n} by a key function.", "groups = {{}}\nfor item in {n}:\n    groups.setdefault(key(item), []).append(item)\nreturn groups"),
    ("parse_{n}(text)", "Parse a comma-separated list of {n}.", "return [part.strip() for part in text.split(',') if part.strip()]"),
    ("main(argv=None)", "Run the command line.", "parser = argparse.ArgumentParser()\nparser.add_argument('path', help='the file to read')\nparser.add_argument('--verbose', action='store_true')\nargs = parser.parse_args(argv)\nprint(args.path)\nreturn 0"),
]  # fmt: skip
_NOUNS = "config settings values names items words records users numbers lines options rows files".split()
_ASSERTIONS = [
    ("upper", "self.assertEqual('foo'.upper(), 'FOO')"),
    ("lower", "self.assertEqual('FOO'.lower(), 'foo')"),
    ("isupper", "self.assertTrue('FOO'.isupper())\nself.assertFalse('Foo'.isupper())"),
    ("islower", "self.assertTrue('foo'.islower())\nself.assertFalse('Foo'.islower())"),
    ("split", "s = 'hello world'\nself.assertEqual(s.split(), ['hello', 'world'])\nwith self.assertRaises(TypeError):\n    s.split(2)"),
    ("join", "self.assertEqual(', '.join(['a', 'b']), 'a, b')"),
    ("strip", "self.assertEqual('  foo '.strip(), 'foo')"),
    ("replace", "self.assertEqual('foo'.replace('o', '0'), 'f00')"),
    ("find", "self.assertEqual('hello'.find('l'), 2)\nself.assertEqual('hello'.find('x'), -1)"),
    ("startswith", "self.assertTrue('hello'.startswith('he'))"),
    ("empty", "self.assertEqual(len([]), 0)\nself.assertFalse([])"),
    ("append", "items = [1, 2]\nitems.append(3)\nself.assertEqual(items, [1, 2, 3])"),
    ("sort", "self.assertEqual(sorted([3, 1, 2]), [1, 2, 3])"),
    ("sum", "self.assertEqual(sum([1, 2, 3]), 6)"),
    ("missing_key", "with self.assertRaises(KeyError):\n    {}['missing']"),
    ("division", "self.assertEqual(7 // 2, 3)\nself.assertRaises(ZeroDivisionError, lambda: 1 / 0)"),
]  # fmt: skip


def _indent(text: str, levels: int = 1) -> str:
    return "\n".join("    " * levels + line if line else line for line in text.split("\n"))


def _function(signature: str, doc: str | None, body: str) -> str:
    inner = (f'"""{doc}"""\n' if doc else "") + body
    return f"def {signature}:\n{_indent(inner)}"


def class_module(rng: random.Random) -> str:
    """A class that keeps things, with four to eight methods."""
    names, attributes, empty, methods = rng.choice(_CLASSES)
    name, attribute = rng.choice(names), rng.choice(attributes)
    doc = rng.choice(
        [
            f"A simple {name.lower()}.",
            f"A {name.lower()} of {rng.choice(_NOUNS)}.",
            "A last-in, first-out stack." if name == "Stack" else f"Keeps {rng.choice(_NOUNS)}.",
        ]
    )
    chosen = rng.sample(methods, rng.randint(4, 8))
    parts = [_function("__init__(self)", None, f"self.{attribute} = {empty.format()}")]
    for signature, method_doc, body in chosen:
        shown = method_doc if rng.random() < 0.5 else None
        parts.append(_function(signature, shown, body.format(a=attribute, c=name)))
    header = "import json\n\n\n" if "json" in "".join(parts) else ""
    return f'{header}class {name}:\n    """{doc}"""\n\n' + "\n\n".join(map(_indent, parts)) + "\n"


def function_module(rng: random.Random) -> str:
    """Two to five functions about one kind of thing, with the imports that they need."""
    noun = rng.choice(_NOUNS)
    parts = []
    for signature, doc, body in rng.sample(_FUNCTIONS, rng.randint(2, 5)):
        if rng.random() < 0.25:
            comments = "\n\nLines that begin with '#' are comments.\n"
            doc += comments if "'#'" in body else ""
        parts.append(_function(signature.format(n=noun), doc.format(n=noun), body.format(n=noun)))
    modules = [m for m in ("argparse", "json") if any(m + "." in part for part in parts)]
    header = "\n".join(f"import {m}" for m in modules) + "\n\n\n" if modules else ""
    has_main = any("def main" in part for part in parts)
    footer = "\n\n\nif __name__ == '__main__':\n    main()" if has_main else ""
    return header + "\n\n\n".join(parts) + footer + "\n"


def unit_test_module(rng: random.Random) -> str:
    """A unit test of three to eight cases."""
    subject = rng.choice(["StringMethods", "Lists", "Basics", "Builtins", "Strings", "Methods"])
    tests = [
        _function(f"test_{name}(self)", None, body)
        for name, body in rng.sample(_ASSERTIONS, rng.randint(3, 8))
    ]
    footer = "\n\n\nif __name__ == '__main__':\n    unittest.main()" if rng.random() < 0.7 else ""
    header = f"import unittest\n\n\nclass Test{subject}(unittest.TestCase):\n\n"
    return header + "\n\n".join(map(_indent, tests)) + footer + "\n"


def program(rng: random.Random) -> str:
    """A short Python module: a class, or a few functions, or a unit test. Nothing stands in it twice."""
    kind = rng.random()
    if kind < 0.4:
        return class_module(rng)
    return function_module(rng) if kind < 0.75 else unit_test_module(rng)


# kind -> (writer, share of the synthetic characters, ends with an end-of-text token)
KINDS: dict[str, tuple[Callable[[random.Random], str], float, bool]] = {
    "cycle": (cycle, 0.18, False),
    "repeated": (repeated_sentence, 0.07, False),
    "counting": (counting, 0.08, False),
    "table": (table, 0.11, True),
    "facts": (facts, 0.12, True),
    "story": (story, 0.14, True),
    "prose": (prose, 0.12, True),
    "program": (program, 0.18, True),
}


def documents(seed: int, num_chars: int) -> list[tuple[str, bool]]:
    """Synthetic documents, `num_chars` characters in all, as (text, ends with an end-of-text token).

    Example: documents(seed=0, num_chars=1000)[0] -> ("1, 2, 3, …", False)
    """
    rng = random.Random(seed)
    result = []
    for writer, share, ends in KINDS.values():
        written = 0
        while written < num_chars * share:
            text = writer(rng)
            written += len(text)
            result.append((text, ends))
    rng.shuffle(result)
    return result


if __name__ == "__main__":
    for kind, (writer, _, _) in KINDS.items():
        print(f"--- {kind}\n{writer(random.Random(7))[:600]}\n")
