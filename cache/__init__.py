"""What is kept of a text beside its tokens: keys and values, recurrent states, prefixes."""
