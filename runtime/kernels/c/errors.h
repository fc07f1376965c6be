// What a function returns in place of a token, or of 0, where it fails; library.py's `checked` says it in words.

#pragma once

enum { NO_NUMBERS = -1, NO_MEMORY = -2, NO_PLACE = -3 };  // the last: a batch names what is not there
