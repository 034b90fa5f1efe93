// What both stand-ins share: devices, the memory that each has given out, and counts of calls. Owned by libcudart.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define MOST_DEVICES 16
#define PAGE (2u << 20)  // granularity of the driver's own mappings

enum kind { HOST = 1, DEVICE = 2 };  // as cudaMemoryType counts them
enum count { LAUNCHES, COPIED, SET, DRIVER_LAUNCHES, REGISTERED, EVENTS, SYNCS, NUM_COUNTS };

struct null_state {
    long counts[NUM_COUNTS];
    size_t used[MOST_DEVICES];
};

struct null_state *null_state(void);
int null_num_devices(void);      // those that the process may see, as it was when it first asked
int null_attribute(int attribute);  // of any device: those of an H200
int null_bus(int device);        // of a device that the process sees: the same in every process
size_t null_total(void);         // bytes of one device
int null_take(int device, size_t nbytes);  // 0: there is no room
void null_give_back(int device, size_t nbytes);
void null_add(void *at, size_t nbytes, enum kind kind, int device);
size_t null_forget(void *at, enum kind kind);
