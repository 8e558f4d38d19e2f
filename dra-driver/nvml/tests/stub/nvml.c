/*
 * NVML stub with two GPUs, for cases that the simulated machine does not have. Defines:
 *   OLD         no symbol newer than driver 450
 *   NO_MEMORY   the GPU shares the host's memory and reports no size (GB10)
 *   LOST        GPU 1 falls off the bus at the second wait for events
 *   NO_COMPUTE  compute instances cannot be created
 *   MPS         GPU 0 has a process that uses MPS
 *   HANG=FILE   the memory of GPU 1 cannot be read while the file exists: the call hangs
 *   BUSY        compute instances cannot be destroyed
 */
#include <stdint.h>
#include <unistd.h>
#include <stdio.h>
#include <string.h>

enum {
    SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10,
    GPU_IS_LOST = 15, IN_USE = 19, INSUFFICIENT_RESOURCES = 23, UNKNOWN = 999,
};

struct profile { unsigned number, id, slices, instances, size, starts[7], count; const char *name; };
struct instance { unsigned id, start, compute; const struct profile *profile; };
struct device { int gpu; struct instance *instance; };

static const struct profile PROFILES[] = {
    {0, 19, 1, 7, 1, {0, 1, 2, 3, 4, 5, 6}, 7, "MIG 1g.10gb"},
    {2, 9, 3, 2, 4, {0, 4}, 2, "MIG 3g.40gb"},
};
static struct device gpus[2] = {{0, NULL}, {1, NULL}};
static struct instance instances[7];
static struct device mig_devices[7];
static int lost[2];

static int known(struct device *device)
{
    return lost[device->gpu] ? GPU_IS_LOST : SUCCESS;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "450.51"); return SUCCESS; }
int nvmlSystemGetNVMLVersion(char *text, unsigned size) { snprintf(text, size, "11.450.51"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device)
{
    *device = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(struct device *device, char *text, unsigned size)
{
    if (device->instance)
        snprintf(text, size, "MIG-%u-%u", device->instance->id, device->instance->compute);
    else
        snprintf(text, size, "GPU-%d", device->gpu);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **device)
{
    for (int gpu = 0; gpu < 2; gpu++) {
        char text[16];
        snprintf(text, sizeof text, "GPU-%d", gpu);
        if (!strcmp(text, uuid)) {
            *device = &gpus[gpu];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(struct device *device, char *text, unsigned size)
{
    snprintf(text, size, "Stub");
    return known(device);
}

int nvmlDeviceGetMinorNumber(struct device *device, unsigned *minor)
{
    *minor = device->gpu;
    return known(device);
}

int nvmlDeviceGetCudaComputeCapability(struct device *device, int *major, int *minor)
{
    *major = 12;
    *minor = 1;
    return known(device);
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };

int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci *pci)
{
    memset(pci, 0, sizeof *pci);
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", device->gpu + 0x1b);
    snprintf(pci->text, sizeof pci->text, "00000000:%02X:00.0", device->gpu + 0x1b);
    return known(device);
}

struct memory { unsigned long long total, free, used; };

static void hang(struct device *device)
{
#ifdef HANG
    while (device->gpu == 1 && !access(HANG, F_OK))
        usleep(1000);
#endif
    (void)device;
}

int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *memory)
{
    hang(device);
#ifdef NO_MEMORY
    return NOT_SUPPORTED;
#endif
    *memory = (struct memory){.total = 81559ull << 20, .free = 81259ull << 20, .used = 300ull << 20};
    return known(device);
}

#ifdef MPS
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct device *device, unsigned *count, struct process *processes)
{
    unsigned room = *count;

    (void)device;
    *count = 1;
    if (room < 1)
        return INSUFFICIENT_SIZE;
    processes[0] = (struct process){ 7, 0, -1, -1 };
    return SUCCESS;
}
#endif

#ifndef OLD
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *memory)
{
    hang(device);
    if (memory->version != (sizeof *memory | 2 << 24))
        return INVALID_ARGUMENT;
#ifdef NO_MEMORY
    return NOT_SUPPORTED;
#endif
    memory->total = 81559ull << 20;
    memory->reserved = 100ull << 20;
    memory->used = 200ull << 20;
    return known(device);
}
#endif

/* Events: the first wait times out; at the second GPU 1 may be lost; later waits return an XID of GPU 0. */

struct event { struct device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; };
static int registered[2], waits, sets;

int nvmlEventSetCreate(int **set)
{
    *set = &sets;
    sets++;
    memset(registered, 0, sizeof registered);
    return SUCCESS;
}

int nvmlEventSetFree(int *set) { sets--; return set == &sets ? SUCCESS : INVALID_ARGUMENT; }
int nvmlDeviceGetSupportedEventTypes(struct device *device, unsigned long long *types) { *types = 8; return known(device); }

int nvmlDeviceRegisterEvents(struct device *device, unsigned long long types, int *set)
{
    if (types != 8 || set != &sets)
        return INVALID_ARGUMENT;
    registered[device->gpu] = 1;
    return known(device);
}

int nvmlEventSetWait_v2(int *set, struct event *event, unsigned milliseconds)
{
    (void)set;
    (void)milliseconds;
    if (waits++ == 0)
        return TIMEOUT;
#ifdef LOST
    lost[1] = 1;
#endif
    if (lost[1] && registered[1])
        return GPU_IS_LOST;
    *event = (struct event){&gpus[0], 8, 48, 3, 0};
    return SUCCESS;
}

/* MIG: GPU 0 only, with MIG mode enabled. */

int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending)
{
    *current = *pending = 1;
    return device->gpu == 0 ? SUCCESS : NOT_SUPPORTED;
}

struct profile_info {
    unsigned id, p2p, slices, instances, multiprocessors, copies, decoders, encoders, jpegs, ofas;
    unsigned long long memory;
};

static const struct profile *by_id(unsigned id)
{
    for (unsigned i = 0; i < sizeof PROFILES / sizeof *PROFILES; i++)
        if (PROFILES[i].id == id)
            return &PROFILES[i];
    return NULL;
}

static const struct profile *by_number(unsigned number)
{
    for (unsigned i = 0; i < sizeof PROFILES / sizeof *PROFILES; i++)
        if (PROFILES[i].number == number)
            return &PROFILES[i];
    return NULL;
}

int nvmlDeviceGetGpuInstanceProfileInfo(struct device *device, unsigned number, struct profile_info *info)
{
    const struct profile *profile = by_number(number);
    if (number >= 17)
        return INVALID_ARGUMENT;
    if (device->gpu || !profile)
        return NOT_SUPPORTED;
    *info = (struct profile_info){.id = profile->id, .slices = profile->slices, .instances = profile->instances,
        .multiprocessors = 16 * profile->slices, .memory = 9984 * profile->size};
    return SUCCESS;
}

struct placement { unsigned start, size; };

int nvmlDeviceGetGpuInstancePossiblePlacements_v2(struct device *device, unsigned id, struct placement *placements, unsigned *count)
{
    const struct profile *profile = by_id(id);
    if (device->gpu || !profile)
        return INVALID_ARGUMENT;
    if (!placements) {
        *count = profile->count;
        return SUCCESS;
    }
    if (*count < profile->count)
        return INSUFFICIENT_SIZE;
    /* In reverse order, because NVML specifies none. */
    for (unsigned i = 0; i < profile->count; i++)
        placements[i] = (struct placement){profile->starts[profile->count - 1 - i], profile->size};
    *count = profile->count;
    return SUCCESS;
}

static int taken(unsigned start, unsigned size)
{
    for (int i = 0; i < 7; i++) {
        const struct instance *other = &instances[i];
        if (other->profile && start < other->start + other->profile->size && other->start < start + size)
            return 1;
    }
    return 0;
}

int nvmlDeviceCreateGpuInstanceWithPlacement(struct device *device, unsigned id, const struct placement *placement, struct instance **instance)
{
    const struct profile *profile = by_id(id);
    if (device->gpu || !profile || placement->size != profile->size)
        return INVALID_ARGUMENT;
    if (taken(placement->start, placement->size))
        return INSUFFICIENT_RESOURCES;
    for (unsigned i = 0; i < 7; i++) {
        if (instances[i].profile)
            continue;
        instances[i] = (struct instance){i + 1, placement->start, -1u, profile};
        *instance = &instances[i];
        return SUCCESS;
    }
    return INSUFFICIENT_RESOURCES;
}

int nvmlDeviceGetGpuInstanceRemainingCapacity(struct device *device, unsigned id, unsigned *count)
{
    const struct profile *profile = by_id(id);
    if (device->gpu || !profile)
        return INVALID_ARGUMENT;
    *count = 0;
    for (unsigned i = 0; i < profile->count; i++)
        *count += !taken(profile->starts[i], profile->size);
    return SUCCESS;
}

int nvmlGpuInstanceDestroy(struct instance *instance)
{
    if (instance->compute != -1u)
        return IN_USE;
    instance->profile = NULL;
    return SUCCESS;
}

int nvmlDeviceGetGpuInstances(struct device *device, unsigned id, struct instance **found, unsigned *count)
{
    unsigned room = *count;
    if (device->gpu)
        return NOT_SUPPORTED;
    *count = 0;
    for (int i = 0; i < 7; i++)
        if (instances[i].profile && instances[i].profile->id == id) {
            if (*count == room)
                return INSUFFICIENT_SIZE;
            found[(*count)++] = &instances[i];
        }
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceById(struct device *device, unsigned id, struct instance **found)
{
    if (device->gpu)
        return NOT_SUPPORTED;
    for (int i = 0; i < 7; i++)
        if (instances[i].profile && instances[i].id == id) {
            *found = &instances[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

struct instance_info { struct device *device; unsigned id, profile; struct placement placement; };

int nvmlGpuInstanceGetInfo(struct instance *instance, struct instance_info *info)
{
    *info = (struct instance_info){&gpus[0], instance->id, instance->profile->id,
        {instance->start, instance->profile->size}};
    return SUCCESS;
}

struct compute_profile_info { unsigned id, slices, instances, multiprocessors, copies, decoders, encoders, jpegs, ofas; };

/* Compute instance profiles: one slice (number 0), all slices of a larger instance (number 2). */
int nvmlGpuInstanceGetComputeInstanceProfileInfo(struct instance *instance, unsigned number, unsigned engine, struct compute_profile_info *info)
{
    const struct profile *profile = by_number(number);
    if (number >= 8 || engine)
        return INVALID_ARGUMENT;
    if (!profile || profile->slices > instance->profile->slices)
        return NOT_SUPPORTED;
    *info = (struct compute_profile_info){.id = number, .slices = profile->slices,
        .instances = instance->profile->slices / profile->slices, .multiprocessors = 16 * profile->slices};
    return SUCCESS;
}

/* A GPU instance has at most one compute instance and is represented by the same struct. */
int nvmlGpuInstanceCreateComputeInstance(struct instance *instance, unsigned profile, struct instance **compute)
{
#ifdef NO_COMPUTE
    return UNKNOWN;
#endif
    if (instance->compute != -1u)
        return INSUFFICIENT_RESOURCES;
    instance->compute = profile;
    *compute = instance;
    return SUCCESS;
}

int nvmlComputeInstanceDestroy(struct instance *compute)
{
#ifdef BUSY
    return IN_USE;
#endif
    compute->compute = -1u;
    return SUCCESS;
}

int nvmlGpuInstanceGetComputeInstances(struct instance *instance, unsigned profile, struct instance **found, unsigned *count)
{
    *count = instance->compute == profile;
    if (*count)
        *found = instance;
    return SUCCESS;
}

struct compute_info { struct device *device; struct instance *gpu_instance; unsigned id, profile; struct placement placement; };

int nvmlComputeInstanceGetInfo_v2(struct instance *compute, struct compute_info *info)
{
    *info = (struct compute_info){&gpus[0], compute, 0, compute->compute, {0, 1}};
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *count) { *count = device->gpu ? 0 : 7; return SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned index, struct device **mig)
{
    if (device->gpu || !instances[index].profile || instances[index].compute == -1u)
        return NOT_FOUND;
    mig_devices[index] = (struct device){0, &instances[index]};
    *mig = &mig_devices[index];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(struct device *mig, unsigned *id) { *id = mig->instance->id; return SUCCESS; }
int nvmlDeviceGetComputeInstanceId(struct device *mig, unsigned *id) { (void)mig; *id = 0; return SUCCESS; }
