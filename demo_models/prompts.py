"""Prompts to train drafters with: templates over topics, and texts that Python itself ships.

    python demo_models/prompts.py 5        # five of them

No prompt comes from a benchmark. There are about 10,000 of mixed kinds, in an order that
never changes.
"""

import ast
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

TOPICS = """
gravity; photosynthesis; the water cycle; volcanoes; earthquakes; the moon; black holes; DNA;
vaccines; the heart; sleep; dreams; memory; nutrition; vitamins; bread; coffee; tea; chocolate;
cheese; gardening; compost; bees; whales; dogs; cats; horses; birds of prey; rain forests; deserts;
the Arctic; coral reefs; climate change; solar panels; wind turbines; batteries; electric cars;
bicycles; trains; airplanes; bridges; concrete; glass; the printing press; the steam engine; the
telephone; radio; television; the internet; search engines; computers; programming; databases;
encryption; machine learning; robots; video games; chess; music theory; the guitar; the piano;
jazz; opera; painting; photography; sculpture; architecture; poetry; novels; theatre; film;
fashion; ancient Egypt; ancient Rome; ancient Greece; the Middle Ages; the Renaissance; the Silk
Road; the Industrial Revolution; democracy; elections; the constitution of a country; human rights;
the United Nations; money; inflation; interest rates; budgets; taxes; insurance; the stock market;
starting a business; marketing; job interviews; remote work; teamwork; leadership; time management;
stress; friendship; marriage; raising children; teaching; learning a language; handwriting; public
speaking; reading; exams; universities; libraries; museums; football; tennis; swimming; running;
yoga; hiking; camping; fishing; cooking rice; soups; salads; breakfast; picnics; birthdays;
weddings; holidays; packing a suitcase; airports; hotels; maps; mountains; rivers; oceans; islands;
cities; villages; traffic; public transport; recycling; water; electricity; firefighters; doctors;
nurses; farmers; lawyers; engineers; scientists; prime numbers; fractions; algebra; geometry;
statistics; probability; logic; philosophy; ethics; happiness; courage; honesty; patience
"""
ASKED = """
What is interesting about {}?; Explain {} in simple words.; Explain {} to a child of eight.; Write
a short paragraph about {}.; Give me five facts about {}.; What are the advantages and
disadvantages of {}?; Write a short story in which {} matters.; Write a poem about {}.; Why is {}
important?; How has {} changed over time?; What do beginners get wrong about {}?; Write an email to
a friend about {}.; Make a list of ten words that have to do with {}, with a short meaning of
each.; Describe {} in three sentences.; What questions would you ask an expert on {}?; Write a
dialogue between two people who talk about {}.; Plan a lesson on {}.; Tell me something about {}
that few people know.; Give advice to someone who wants to know more about {}.; Compare {} with
{}.; Write a speech about {}.; Write the introduction of an essay on {}.; What would the world be
like without {}?; Write a quiz with four questions about {}, with answers.; Write step-by-step
instructions that have to do with {}.; I am worried about {}. What should I do?; Summarise what you
know about {}.; Hi! Can you tell me about {}?; Is {} more useful than {}?; Write a title and a
summary for an article about {}.
"""
TASKS = """
adds up the numbers of a list; finds the largest number of a list; reverses a string; counts the
vowels of a string; checks whether a word is a palindrome; checks whether a number is prime;
computes a factorial; makes the first n Fibonacci numbers; sorts a list of names; removes
duplicates from a list; merges two dictionaries; counts the words of a text; reads a file line by
line; writes a list to a CSV file; parses a date; computes the days between two dates; converts
Celsius to Fahrenheit; computes the area of a circle; finds the greatest common divisor; searches a
sorted list by bisection; flattens a nested list; groups words by their first letter; rotates a
list; transposes a matrix; multiplies two matrices; draws a triangle of stars; plays rock, paper,
scissors; guesses a number; validates an email address; generates a password; computes the mean and
the median; splits a list into chunks; retries a call that may fail; measures how long a call
takes; keeps a stack; keeps a queue; walks through a directory; downloads a web page; formats a
table; parses command-line arguments
"""
LANGUAGES = "Python; JavaScript; Java; C; SQL where that makes sense; Bash"
CODED = """
Write a {1} function that {0}.; Write {1} code that {0}, and explain it.; Write a class in {1} that
{0}.; How do I write a program in {1} that {0}?; Write a test for a {1} function that {0}.; Show me
the shortest {1} program that {0}.
"""
READ = r"""
Summarise this text in two sentences:\n\n{}; Summarise the following:\n\n{}; What is the main point
of this text?\n\n {}; Rewrite this text in simpler words:\n\n{}; List the key points of this
text:\n\n{}; Write a question that this text answers, and the answer:\n\n{}; Continue this
text:\n\n{}; Give this text a title, and say why:\n\n{}
"""
SEEN = r"""
Explain what this Python code does:\n\n```python\n{}\n```; Add comments to this
code:\n\n```python\n{}\n```; Find possible mistakes in this code:\n\n```python\n{}\n```; Write a
docstring for this function:\n\n```python\n{}\n ```; Rewrite this code so that it is easier to
read:\n\n```python\n{}\n```
"""


def _entries(text: str) -> list[str]:
    """What stands between the semicolons; a written-out \\n is a new line."""
    lines = " ".join(text.split())
    entries = [entry.strip().replace("\\n", "\n") for entry in lines.split(";")]
    return [entry.replace("\n ", "\n") for entry in entries if entry]


def _passages() -> Iterator[str]:
    """Paragraphs of the documentation that Python brings along."""
    from pydoc_data import topics

    for text in topics.topics.values():
        for part in text.split("\n\n"):
            words = " ".join(part.split())
            if 200 < len(words) < 700 and sum(c.isalpha() or c == " " for c in words) > 0.9 * len(
                words
            ):
                yield words


def _functions() -> Iterator[str]:
    """Short functions of the standard library."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            source = file.read_text("utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        lines = source.split("\n")  # ast.get_source_segment splits it anew for each function
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                *body, last = lines[node.lineno - 1 : node.end_lineno]
                last = last.encode()[: node.end_col_offset].decode()  # without a comment behind it
                text = "\n".join([*body, last])
                if 120 < len(text) < 600:
                    yield text


def about(text: str, number: int) -> str:
    """A task on a text to read, each number another one."""
    forms = _entries(READ)
    return forms[number % len(forms)].format(text)


def prompts() -> list[str]:
    """All of them, mixed."""
    rng = random.Random(0)
    topics, asked = _entries(TOPICS), _entries(ASKED)
    made = [form.format(topic, rng.choice(topics)) for topic in topics for form in asked]
    for form in _entries(CODED):
        for task in _entries(TASKS):
            made += [form.format(task, language) for language in dict.fromkeys(_entries(LANGUAGES))]
    read, seen = _entries(READ), _entries(SEEN)
    made += [rng.choice(read).format(passage) for passage in _passages() for _ in range(2)]
    made += [rng.choice(seen).format(code) for code in _functions() for _ in range(2)]
    for _ in range(600):
        a, b, c = (rng.randint(2, 99) for _ in range(3))
        made += [
            f"What is {a} {rng.choice('+-*')} {b}? Show the steps.",
            f"I have {a} apples, buy {b} more and give {c} away. How many are left?",
        ]
    made = list(dict.fromkeys(made))
    rng.shuffle(made)
    return made


if __name__ == "__main__":
    for prompt in prompts()[: int(sys.argv[1]) if len(sys.argv) > 1 else 10]:
        print(prompt, end="\n---\n")
