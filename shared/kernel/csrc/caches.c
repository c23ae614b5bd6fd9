/* How large the last level of caches is: whether weights can stay there until they are read again. */
#include "internal.h"

#include <stdio.h>

/* Linux' own table: what sysconf says of AMD's CPUs is the sum of caches that no core reaches alone. */
uint64_t cp_last_level_bytes(void)
{
    FILE *file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r");
    unsigned long long size = 0;
    char unit = 0;
    if (file == NULL)
        return 0;
    if (fscanf(file, "%9llu%c", &size, &unit) < 1)
        size = 0;
    fclose(file);
    return (uint64_t)size << (unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : 0);
}
