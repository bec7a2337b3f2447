#include "cspec.h"

_Bool cspec_abort_requested(void *flag)
{
    return *(volatile int32_t *)flag != 0;
}
