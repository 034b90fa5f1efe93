// State that both stubs share: devices, memory allocated on each, and counts of calls. The stub of libcudart owns it.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define MOST_DEVICES 16
#define PAGE (2u << 20)  // granularity of the driver's own mappings

enum kind { HOST = 1, DEVICE = 2 };  // values of cudaMemoryType
enum count { LAUNCHES, COPIED, SET, DRIVER_LAUNCHES, REGISTERED, EVENTS, SYNCS, NUM_COUNTS };

struct null_state {
    long counts[NUM_COUNTS];
    size_t used[MOST_DEVICES];
};

struct null_state *null_state(void);
int null_num_devices(void);      // devices that the process sees; fixed at the first call
int null_attribute(int attribute);  // the same for every device: the value of an H200
int null_bus(int device);        // PCI bus of a visible device; the same in every process
size_t null_total(void);         // bytes of memory per device
int null_take(int device, size_t nbytes);  // 0 if there is not enough memory
void null_give_back(int device, size_t nbytes);
void null_add(void *at, size_t nbytes, enum kind kind, int device);
size_t null_forget(void *at, enum kind kind);
