// Which part of the text each token wrote. A token's own text does not say: the bytes of one
// character may be spread over several tokens, some tokenizers drop a lone token's leading blank,
// and special tokens write nothing.

const PART = "\ufffd"; // what a tokenizer writes for the bytes of an unfinished character

/**
 * Splits `text`, which a cycle released, among its tokens, whose own texts are `labels`. The pieces
 * joined are `text`, whatever the labels.
 *
 * Example: pieces(["caf", "\ufffd", "\ufffd", "!"], "café!") -> ["caf", "", "é", "!"].
 */
export function pieces(labels, text) {
  const result = labels.map(() => "");
  let at = 0;
  labels.forEach((label, i) => {
    const found = label && !label.includes(PART) ? text.indexOf(label, at) : -1;
    if (found < 0) return;
    const before = text.slice(at, found);
    const isBlank = i === 0 || before.trim() === "";
    result[isBlank ? i : i - 1] += before;
    result[i] += label;
    at = found + label.length;
  });
  if (labels.length) result[labels.length - 1] += text.slice(at);
  return result;
}
