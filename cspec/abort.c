#include "cspec.h"

_Bool cspec_abort_requested(void *flag)
{
    return *(volatile int32_t *)flag != 0;
}

_Bool cspec_load_wanted(float progress, void *flag)
{
    (void)progress;
    return !cspec_abort_requested(flag);
}
