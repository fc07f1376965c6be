// Tiles of weights whose blocks share scales over 256 inputs: the other half of blocks.c's forms.

#define K_BLOCKS
#include "blocks.c"
