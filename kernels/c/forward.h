// One forward of a decoder.

#pragma once

#include "decoder.h"

int run_decoder(const decoder *d, const batch *f, int threads);  // 0, NO_MEMORY or NO_PLACE
