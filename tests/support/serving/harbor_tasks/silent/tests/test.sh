#!/bin/bash
echo no reward today
