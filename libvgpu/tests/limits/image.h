// Images of GPU code with global variables of a given size, in the forms that nvcc writes.

#pragma once

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum Form { PTX, CUBIN, CONTAINER, WRAPPER, COMPRESSED_CONTAINER, CONTAINER_OF_PTX };

struct Image { const unsigned char *start; size_t length; };

static unsigned char *put(unsigned char *at, const void *bytes, size_t length) {
    memcpy(at, bytes, length);
    return at + length;
}

static unsigned char *put_section(unsigned char *at, uint32_t name, uint32_t kind, uint64_t offset, uint64_t bytes) {
    struct { uint32_t name, kind; uint64_t flags, address, offset, bytes; uint32_t link, info; uint64_t alignment, entry; } section = {name, kind, 0, 0, offset, bytes, 0, 0, 8, 0};
    return put(at, &section, sizeof section);
}

// Three quarters of the variables have no initial value, as far as the contents of the others fit.
static unsigned char *put_cubin(unsigned char *at, uint64_t bytes) {
    static const char names[] = "\0.shstrtab\0.nv.global\0.nv.global.init\0.nv.shared.any\0.text.any";
    uint64_t initialized = bytes / 4 < 256 ? bytes / 4 : 256;
    struct { unsigned char magic[16]; uint16_t type, machine; uint32_t version; uint64_t entry, segments, sections; uint32_t flags; uint16_t bytes, segment, segment_count, section, section_count, names; }
        header = {"\177ELF\2\1\1\x41", 2, 190, 1, 0, 0, 64 + sizeof names + initialized, 0, 64, 0, 0, 64, 6, 1};
    at = put(at, &header, sizeof header);
    at = put(at, names, sizeof names);
    memset(at, 7, initialized);
    at = put_section(at + initialized, 0, 0, 0, 0);
    at = put_section(at, 1, 3, 64, sizeof names);
    at = put_section(at, 11, 8, 0, bytes - initialized);
    at = put_section(at, 22, 1, 64 + sizeof names, initialized);
    // Neither shared memory nor code is a variable.
    at = put_section(at, 38, 8, 0, 48 << 10);
    return put_section(at, 53, 1, 0, 16 << 20);
}

static unsigned char *put_ptx(unsigned char *at, unsigned long long bytes) {
    return at + 1 + sprintf((char *)at, ".version 6.4\n.target sm_50\n.address_size 64\n.visible .global .align 8 .b8 data[%llu];\n", bytes);
}

static unsigned char *put_container(unsigned char *at, uint64_t bytes, enum Form form) {
    unsigned char *start = at;
    at += 16 + 64;
    // The simulated driver reads the size from a "compressed" member; libvgpu cannot.
    at = form == COMPRESSED_CONTAINER ? put(at, &bytes, sizeof bytes) : form == CONTAINER_OF_PTX ? put_ptx(at, bytes) : put_cubin(at, bytes);
    uint64_t length = (uint64_t)(at - start) - 16 - 64;
    struct { uint32_t magic; uint16_t version, header; uint64_t bytes; } container = {0xba55ed50, 1, 16, length + 64};
    struct { uint16_t kind, version; uint32_t header; uint64_t bytes; uint32_t compressed, unused; uint16_t minor, major; uint32_t arch, name, name_length; uint64_t flags, zero, uncompressed; }
        member = {form == CONTAINER_OF_PTX ? 1 : 2, 0x101, 64, length, 0, 0, 0, 1, 90, 0, 0, form == COMPRESSED_CONTAINER ? 0x8011 : 0x11, 0, 0};
    put(put(start, &container, sizeof container), &member, sizeof member);
    return at;
}

// The image lives until the next call.
static struct Image make_image(unsigned long long bytes, enum Form form) {
    static _Alignas(8) unsigned char image[4096];
    static struct { uint32_t magic, version; const void *image; void *unused; } wrapper = {0x466243b1, 1, image, NULL};
    unsigned char *end = form == PTX ? put_ptx(image, bytes) : form == CUBIN ? put_cubin(image, bytes) : put_container(image, bytes, form);
    if (form == WRAPPER) return (struct Image){(const unsigned char *)&wrapper, sizeof wrapper};
    return (struct Image){image, (size_t)(end - image)};
}
