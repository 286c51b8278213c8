// A disk that refuses, for tests: preloaded, it lets calls on what lies below REFUSED_DIRECTORY fail once the file
// REFUSED_WHEN is there, with the error number in it, as a quota, an error of the disk or lost rights would have them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

// The error number, if calls of this kind are refused on `path` now: content first, then names.
static int refused(const char *path, const char *kind) {
    const char *directory = getenv("REFUSED_DIRECTORY"), *when = getenv("REFUSED_WHEN");
    char text[64] = "";
    if (!directory || !when || !path || strncmp(path, directory, strlen(directory)) != 0) return 0;
    int descriptor = REAL(open64)(when, O_RDONLY);
    if (descriptor < 0) return 0;
    ssize_t count = read(descriptor, text, sizeof text - 1);
    close(descriptor);
    return count > 0 && strstr(text, kind) ? atoi(text) : 0;
}

static int refused_file(int descriptor, const char *kind) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t count = readlink(link, path, sizeof path - 1);
    return count > 0 ? refused(path, kind) : 0;
}

#define FAIL(number) do { int found = (number); if (found) { errno = found; return -1; } } while (0)

ssize_t write(int descriptor, const void *bytes, size_t count) {
    FAIL(refused_file(descriptor, "write"));
    return REAL(write)(descriptor, bytes, count);
}

int fsync(int descriptor) {
    FAIL(refused_file(descriptor, "sync"));
    return REAL(fsync)(descriptor);
}

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    if (flags & (O_WRONLY | O_RDWR | O_CREAT)) FAIL(refused(path, "names"));
    return REAL(open64)(path, flags, mode);
}

int mkdir(const char *path, mode_t mode) {
    FAIL(refused(path, "names"));
    return REAL(mkdir)(path, mode);
}

int rename(const char *from, const char *to) {
    FAIL(refused(to, "names"));
    return REAL(rename)(from, to);
}

int unlink(const char *path) {
    FAIL(refused(path, "names"));
    return REAL(unlink)(path);
}

int rmdir(const char *path) {
    FAIL(refused(path, "names"));
    return REAL(rmdir)(path);
}
