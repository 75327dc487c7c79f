/* All functions of the library. A file level_N.c defines, for its processors, LANES (float32 numbers of a vector) and
 * V(name), the name of a function there, and includes this; library.py chooses the level when it is loaded. */
#include "lanes.h"

#include "elements.h"
#include "packing.h"

#include "hashing.h"

#include "philox.c"

#include "attention.c"
#include "countsketch.c"
#include "derivatives.c"
#include "gated.c"
#include "masks.c"
#include "normal.c"
#include "norms.c"
#include "pooling.c"
#include "packing.c"
#include "channels.c"
#include "transforms.c"
